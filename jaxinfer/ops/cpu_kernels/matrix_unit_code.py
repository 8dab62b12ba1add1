"""The assembly of bfloat16 products in a processor's matrix unit (Intel's AMX), for one row or any number of them.

The unit has eight registers, tiles, of up to 16 lines of 64 bytes. Its instruction adds to a tile of sums, [16 outputs,
16 rows] in float32, the products of 16 rows of weights and 16 rows of x, 32 numbers each. Every sum has one place from
the first number of its row to the last, so a row's results depend on the row and on the weights alone.

A tile of weights is what lies in memory. One of x holds pairs of numbers, pair by pair those of all its rows. So the
first pieces of a call pack x; the others wait for them. A single row is such a tile as it is.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_code import OF_MATRIX, PIECES_PER_THREAD, chosen_matrix
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# The rows of a tile, the bfloat16 numbers of its lines, and the bytes of both.
_ROWS, _NUMBERS, _LINE = 16, 32, 64
_TILE = _ROWS * _LINE
# Outputs and rows of the sums in tiles at once, in tiles: for few rows, for many, and for the last outputs.
_SHAPES = (4, 1), (2, 2), (2, 1), (1, 2), (1, 1)
# The registers: four of sums, two of weights, two of x.
_SUMS, _WEIGHTS, _X = (0, 1, 2, 3), (4, 5), (6, 7)
# How many numbers of a row of weights are fetched ahead.
_AHEAD = 256
# The packed rows, in numbers, that stay in a core's cache while weights pass by.
_CACHED = 1 << 19

_RECORD = "x", "packed", "rows", "length", "groups", "first_batch", "per_group", "span", "packs"
_DECLARATIONS = """\
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""


def scratch_numbers(items: int, rows: int, length: int) -> int:
    """Return the bfloat16 numbers of a call's scratch: a count of packed tiles of rows, and these."""
    return _NUMBERS + (items * -(-rows // _ROWS) * _ROWS * length if rows > 1 else 0)


def matrix_module(vectors: Vectors, count: int = 1) -> str:
    """Return the assembly of ``handler(x [I, M, K], l, w [L, B, S, F], ...) -> y [I, M, N], ..., scratch``.

    All is as in `product_code.dot_module` with bfloat16, for K a multiple of 32. The scratch has `scratch_numbers`.
    """
    record = Record(*_RECORD, *(f"{each}{matrix}" for matrix in range(count) for each in OF_MATRIX))

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, layer, *matrices = arguments
        *products, scratch = results
        items, rows, length = x.shape(code, 3)
        layers, batches = matrices[0].shape(code, 2)
        outputs = [y.shape(code, 3)[2] for y in products]
        all_outputs = code.total(outputs)
        wanted = code.ceiling(code.arithmetic("mul", threads, PIECES_PER_THREAD), items)
        unit = 2 * _ROWS
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), unit), unit)
        pieces = [code.ceiling(each, span) for each in outputs]
        per_group = code.total(pieces)
        tiles = code.ceiling(rows, _ROWS)
        is_single = code.value(f"icmp eq i64 {rows}, 1")
        packs = code.value(f"select i1 {is_single}, i64 0, i64 {code.arithmetic('mul', items, tiles)}")
        code.store_at("i64", 0, scratch.numbers, 0)
        pointers = {"x": x.numbers, "packed": scratch.numbers}
        numbers = {
            "rows": rows, "length": length, "groups": code.arithmetic("sdiv", items, batches), "per_group": per_group,
            "first_batch": code.arithmetic("mul", layer.layer(code, layers), batches), "span": span, "packs": packs,
        }  # fmt: skip
        for index, (w, y) in enumerate(zip(matrices, products)):
            _, _, lines, stride = w.shape(code, 4)
            pointers |= {f"w{index}": w.numbers, f"y{index}": y.numbers}
            values = outputs[index], stride, lines, code.total(pieces[:index])
            numbers |= {f"{name}{index}": value for name, value in zip(OF_MATRIX[2:], values)}
        weights = code.arithmetic("mul", items, code.arithmetic("mul", all_outputs, length))
        whole = code.arithmetic("add", packs, code.arithmetic("mul", items, per_group))
        return Plan(pointers, numbers, whole, code.arithmetic("mul", weights, tiles))

    tiles = [_tile_product(*shape) for shape in _SHAPES]
    shared = [_DECLARATIONS, _turn(), _finish(), _configure(), *tiles, _products(), _pack(record), _wait(vectors)]
    return make_module(vectors, [*shared, _piece(record, count)], record, (2 + count, count + 1), plan)


def _tile_product(outputs: int, rows: int) -> str:
    """Return ``sum_OUTPUTSxROWS(x, w, sums, length, stride, pitch, block, ahead)``: that many tiles of sums.

    Rows of w are ``stride`` bytes apart, lines of packed x and of sums ``pitch``, tiles of rows ``block``. While it
    computes, the weights that follow are fetched: the last numbers of these outputs' rows, then those at ``ahead``.
    """
    parameters = "ptr %x, ptr %w, ptr %sums, i64 %length, i64 %stride, i64 %pitch, i64 %block, ptr %ahead"
    code = Code(f"internal void @sum_{outputs}x{rows}({parameters}) #0")
    tile = code.arithmetic("mul", "%pitch", _ROWS)
    lines = code.arithmetic("mul", "%stride", _ROWS)
    distance = code.smaller("%length", _AHEAD)
    last = code.arithmetic("sub", "%length", distance)
    here = code.at("bfloat", "%w", distance)
    there = code.at("bfloat", "%ahead", code.arithmetic("sub", 0, last))
    for index in range(outputs * rows):
        code.effect(f"call void @llvm.x86.tilezero(i8 {_SUMS[index]})")
    with code.repeated("step", 0, "%length", _NUMBERS) as step:
        is_here = code.value(f"icmp slt i64 {step.index}, {last}")
        fetched = code.at("bfloat", code.value(f"select i1 {is_here}, ptr {here}, ptr {there}"), step.index)
        place_w = code.at("bfloat", "%w", step.index)
        place_x = code.at("i8", "%x", code.arithmetic("mul", code.arithmetic("sdiv", step.index, 2), "%pitch"))
        for row in range(rows):
            place = code.at("i8", place_x, code.arithmetic("mul", "%block", row))
            code.effect(f"call void @llvm.x86.tileloadd64(i8 {_X[row]}, ptr {place}, i64 %pitch)")
        for output in range(outputs):
            place = code.at("i8", place_w, code.arithmetic("mul", lines, output))
            weights = _WEIGHTS[output % len(_WEIGHTS)]
            code.effect(f"call void @llvm.x86.tileloadd64(i8 {weights}, ptr {place}, i64 %stride)")
            for row in range(rows):
                sums = _SUMS[output * rows + row]
                code.effect(f"call void @llvm.x86.tdpbf16ps(i8 {sums}, i8 {weights}, i8 {_X[row]})")
            for line in range(_ROWS):
                code.effect(f"call void @llvm.prefetch.p0(ptr {fetched}, i32 0, i32 2, i32 1)")
                if (output, line) != (outputs - 1, _ROWS - 1):
                    fetched = code.at("i8", fetched, "%stride")
    for index in range(outputs * rows):
        place = code.at("i8", "%sums", code.arithmetic("mul", tile, index))
        code.effect(f"call void @llvm.x86.tilestored64(i8 {_SUMS[index]}, ptr {place}, i64 %pitch)")
    code.effect("ret void")
    return code.text()


def _turn() -> str:
    """Return ``turn(from, to, from_pitch, to_pitch, last, count)``, which transposes 16 by 16 words of four bytes.

    Pitches are in bytes. Lines after the ``last`` are not read, but repeat it; only ``count`` are written.
    """
    parameters = "ptr %from, ptr %to, i64 %from_pitch, i64 %to_pitch, i64 %last, i64 %count"
    code, wide = Code(f"internal void @turn({parameters}) #0"), f"<{_ROWS} x float>"
    place, lines = "%from", []
    for index in range(_ROWS):
        lines.append(code.load(wide, place, 4))
        is_before = code.value(f"icmp slt i64 {index}, %last")
        place = code.at("i8", place, code.value(f"select i1 {is_before}, i64 %from_pitch, i64 0"))
    half = _ROWS // 2
    masks = [
        ", ".join(f"i32 {lane}, i32 {_ROWS + lane}" for lane in range(first, first + half)) for first in (0, half)
    ]
    # Lines shuffled like cards with those half the lines on: after four times, numbers and lines have changed places.
    for _ in range(_ROWS.bit_length() - 1):
        lines = [
            code.value(f"shufflevector {wide} {one}, {wide} {other}, <{_ROWS} x i32> <{mask}>")
            for one, other in zip(lines[:half], lines[half:])
            for mask in masks
        ]
    place = "%to"
    for index, line in enumerate(lines):
        code.effect(f"store {wide} {line}, ptr {place}, align 4")
        place = code.at("i8", place, "%to_pitch")
        code.branch(code.value(f"icmp sgt i64 %count, {index + 1}"), f"line{index + 1}", f"line{_ROWS}")
        code.start(f"line{index + 1}")
    code.effect("ret void")
    return code.text()


def _finish() -> str:
    """Return ``finish(sums, y, width, rows, outputs)``, which writes a tile of sums into rows of y."""
    code = Code("internal void @finish(ptr %sums, ptr %y, i64 %width, i64 %rows, i64 %outputs) #0")
    turned = code.value(f"alloca [{_TILE} x i8], align {_LINE}")
    bytes_apart = code.arithmetic("mul", "%width", 4)
    count = code.smaller("%rows", _ROWS)
    code.branch(code.value(f"icmp sge i64 %outputs, {_ROWS}"), "whole", "part")
    code.start("whole")
    code.effect(
        f"call void @turn(ptr %sums, ptr %y, i64 {_LINE}, i64 {bytes_apart}, i64 {_ROWS - 1}, i64 {count})"
    )
    code.effect("ret void")
    code.start("part")
    code.effect(f"call void @turn(ptr %sums, ptr {turned}, i64 {_LINE}, i64 {_LINE}, i64 {_ROWS - 1}, i64 {count})")
    with code.repeated("row", 0, count) as row, code.repeated("output", 0, "%outputs") as output:
        line = code.at("i8", turned, code.arithmetic("mul", row.index, _LINE))
        to = code.at("i8", "%y", code.arithmetic("mul", row.index, bytes_apart))
        code.store_at("float", code.load_at("float", line, output.index), to, output.index)
    code.effect("ret void")
    return code.text()


def _configure() -> str:
    """Return ``configure(config, outputs, pitch)``: tiles of so many outputs, with lines of sums and x of so many bytes.

    A configuration has 64 bytes: its kind, 1; from byte 16, the bytes of a line of each tile, as 16-bit integers; from
    byte 48, the lines of each tile.
    """
    code = Code("internal void @configure(ptr %config, i64 %outputs, i64 %pitch) #0")
    code.effect(f"store <{_LINE} x i8> zeroinitializer, ptr %config, align 1")
    code.effect("store i8 1, ptr %config")
    lines, pitch = (code.value(f"trunc i64 {each} to i8") for each in ("%outputs", "%pitch"))
    for tile in (*_SUMS, *_WEIGHTS, *_X):
        length = _LINE if tile in _WEIGHTS else pitch
        code.effect(f"store i8 {length}, ptr {code.at('i8', '%config', 16 + 2 * tile)}")
        code.effect(f"store i8 {_ROWS if tile in _X else lines}, ptr {code.at('i8', '%config', 48 + tile)}")
    code.effect("call void @llvm.x86.ldtilecfg(ptr %config)")
    code.effect("ret void")
    return code.text()


def _products() -> str:
    """Return ``products(x, w, y, rows, outputs, length, stride, width)``; x is packed, or one row as it is."""
    parameters = "ptr %x, ptr %w, ptr %y, i64 %rows, i64 %outputs, i64 %length, i64 %stride, i64 %width"
    code = Code(f"internal void @products({parameters}) #0")
    config = code.value(f"alloca [{_LINE} x i8], align {_LINE}")
    sums = code.value(f"alloca [{len(_SUMS) * _TILE} x i8], align {_LINE}")
    is_single = code.value("icmp eq i64 %rows, 1")
    pitch = code.value(f"select i1 {is_single}, i64 4, i64 {_LINE}")
    line = code.arithmetic("mul", "%stride", 2)
    block = code.arithmetic("mul", "%length", 2 * _ROWS)
    is_few = code.value(f"icmp sle i64 %rows, {_ROWS}")
    code.effect(f"call void @configure(ptr {config}, i64 {_ROWS}, i64 {pitch})")
    # The loops over rows and outputs are those of this function, so that each shape is written once.
    code.effect("br label %output")
    code.start("output")
    rounds = ", ".join(f"[ %next{tiles}, %after{tiles} ]" for tiles in (4, 2, 1))
    code.value(f"phi i64 [ 0, %entry ], {rounds}", "%n")
    left = code.arithmetic("sub", "%outputs", "%n")
    code.branch(code.value(f"icmp sgt i64 {left}, 0"), "some", "end")
    code.start("some")
    this_w = code.at("bfloat", "%w", code.arithmetic("mul", "%n", "%stride"))
    this_y = code.at("float", "%y", "%n")
    has_four = code.value(f"icmp sge i64 {left}, {4 * _ROWS}")
    code.branch(code.value(f"and i1 {is_few}, {has_four}"), "shape4", "no4")
    code.start("no4")
    code.branch(code.value(f"icmp sge i64 {left}, {2 * _ROWS}"), "shape2", "no2")
    code.start("no2")
    code.branch(code.value(f"icmp sge i64 {left}, {_ROWS}"), "shape1", "narrow")
    code.start("narrow")
    code.effect(f"call void @configure(ptr {config}, i64 {left}, i64 {pitch})")
    code.effect("br label %shape1")
    for tiles in (4, 2, 1):
        code.start(f"shape{tiles}")
        ahead = code.at("bfloat", this_w, code.arithmetic("mul", "%stride", tiles * _ROWS))
        step = _ROWS * max(rows for outputs, rows in _SHAPES if outputs == tiles)
        with code.repeated(f"rows{tiles}", 0, "%rows", step) as row:
            place_x = code.at("i8", "%x", code.arithmetic("mul", code.arithmetic("sdiv", row.index, _ROWS), block))
            place_y = code.at("float", this_y, code.arithmetic("mul", row.index, "%width"))
            to = code.value(f"select i1 {is_single}, ptr {place_y}, ptr {sums}")
            rest = code.arithmetic("sub", "%rows", row.index)
            of_both = f"ptr {to}, i64 %length, i64 {line}, i64 {pitch}, i64 {block}, ptr {ahead}"
            name = f"rows{tiles}"
            code.branch(code.value(f"icmp sgt i64 {rest}, {_ROWS}"), f"{name}_two", f"{name}_one")
            for word, rows in (("two", 2), ("one", 1)):
                code.start(f"{name}_{word}")
                if (tiles, rows) in _SHAPES:
                    code.effect(f"call void @sum_{tiles}x{rows}(ptr {place_x}, ptr {this_w}, {of_both})")
                if rows == 1:
                    code.branch(is_single, f"{name}_done", f"{name}_finish_one")
                    code.start(f"{name}_finish_one")
                for output in range(tiles if (tiles, rows) in _SHAPES else 0):
                    for tile in range(rows):
                        from_sums = code.at("i8", sums, _TILE * (output * rows + tile))
                        to_y = code.at("float", place_y, code.arithmetic("mul", "%width", tile * _ROWS))
                        to_y = code.at("float", to_y, output * _ROWS)
                        rows_left = code.arithmetic("sub", rest, tile * _ROWS)
                        outputs_left = code.arithmetic("sub", left, output * _ROWS)
                        numbers = f"i64 %width, i64 {rows_left}, i64 {outputs_left}"
                        code.effect(f"call void @finish(ptr {from_sums}, ptr {to_y}, {numbers})")
                code.effect(f"br label %{name}_done")
            code.start(f"{name}_done")
        code.value(f"add i64 %n, {tiles * _ROWS}", f"%next{tiles}")
        code.effect(f"br label %after{tiles}")
        code.start(f"after{tiles}")
        code.effect("br label %output")
    code.start("end")
    code.effect("call void @llvm.x86.tilerelease()")
    code.effect("ret void")
    return code.text()


def _pack(record: Record) -> str:
    """Return ``pack(record, index)``, which packs a tile of rows of x, and counts it."""
    code = Code("internal void @pack(ptr %record, i64 %index) #0")
    x, packed = record.pointer(code, "x"), record.pointer(code, "packed")
    rows, length = record.number(code, "rows"), record.number(code, "length")
    tiles = code.ceiling(rows, _ROWS)
    first = code.arithmetic("mul", code.arithmetic("srem", "%index", tiles), _ROWS)
    row = code.arithmetic("add", code.arithmetic("mul", code.arithmetic("sdiv", "%index", tiles), rows), first)
    last = code.smaller(code.arithmetic("sub", code.arithmetic("sub", rows, first), 1), _ROWS - 1)
    from_x = code.at("bfloat", x, code.arithmetic("mul", row, length))
    number = code.arithmetic("mul", code.arithmetic("mul", "%index", length), _ROWS)
    to = code.at("bfloat", code.at("bfloat", packed, _NUMBERS), number)
    bytes_apart = code.arithmetic("mul", length, 2)
    with code.repeated("step", 0, length, _NUMBERS) as step:
        places = f"ptr {code.at('bfloat', from_x, step.index)}, ptr {code.at('i8', to, code.arithmetic('mul', step.index, 32))}"
        code.effect(f"call void @turn({places}, i64 {bytes_apart}, i64 {_LINE}, i64 {last}, i64 {_ROWS})")
    code.value(f"atomicrmw add ptr {packed}, i64 1 release")
    code.effect("ret void")
    return code.text()


def _wait(vectors: Vectors) -> str:
    """Return ``wait(counter, count)``; pieces are taken in order, so other threads are at what it waits for."""
    code = Code("internal void @wait(ptr %counter, i64 %count) #0")
    code.effect("br label %look")
    code.start("look")
    seen = code.value("load atomic i64, ptr %counter acquire, align 8")
    code.branch(code.value(f"icmp slt i64 {seen}, %count"), "more", "end")
    code.start("more")
    code.effect(f"call {vectors.pause}")
    code.effect("br label %look")
    code.start("end")
    code.effect("ret void")
    return code.text()


def _piece(record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which packs rows, or computes ``span`` outputs of a matrix for all rows of one x."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x, packed = record.pointer(code, "x"), record.pointer(code, "packed")
    rows, length, groups, first_batch, per_group, span, packs = (record.number(code, each) for each in _RECORD[2:])
    code.branch(code.value(f"icmp slt i64 %index, {packs}"), "pack", "multiply")
    code.start("pack")
    code.effect("call void @pack(ptr %record, i64 %index)")
    code.effect("ret void")
    code.start("multiply")
    code.effect(f"call void @wait(ptr {packed}, i64 {packs})")
    among_all = code.arithmetic("sub", "%index", packs)
    which = code.arithmetic("sdiv", among_all, per_group)
    among = code.arithmetic("srem", among_all, per_group)
    w, y, outputs, stride, lines, first_piece = chosen_matrix(code, record, count, among)
    first = code.arithmetic("mul", code.arithmetic("sub", among, first_piece), span)
    part = code.smaller(span, code.arithmetic("sub", outputs, first))
    is_single = code.value(f"icmp eq i64 {rows}, 1")
    of_x = code.arithmetic("mul", which, length)
    tiles = code.arithmetic("mul", code.ceiling(rows, _ROWS), _ROWS)
    of_packed = code.arithmetic("add", code.arithmetic("mul", of_x, tiles), _NUMBERS)
    this_x = code.value(
        f"select i1 {is_single}, ptr {code.at('bfloat', x, of_x)}, ptr {code.at('bfloat', packed, of_packed)}"
    )
    batch = code.arithmetic("add", first_batch, code.arithmetic("sdiv", which, groups))
    of_w = code.arithmetic("mul", code.arithmetic("add", code.arithmetic("mul", batch, lines), first), stride)
    of_w = code.arithmetic("add", of_w, code.arithmetic("mul", code.arithmetic("srem", which, groups), length))
    of_y = code.arithmetic("add", code.arithmetic("mul", which, code.arithmetic("mul", rows, outputs)), first)
    this_w, this_y = code.at("bfloat", w, of_w), code.at("float", y, of_y)
    at_once = code.larger(code.arithmetic("and", code.arithmetic("sdiv", _CACHED, length), -2 * _ROWS), 2 * _ROWS)
    with code.repeated("some", 0, code.ceiling(rows, at_once)) as some:
        row = code.arithmetic("mul", some.index, at_once)
        operands = (
            f"ptr {code.at('bfloat', this_x, code.arithmetic('mul', row, length))}",
            f"ptr {this_w}",
            f"ptr {code.at('float', this_y, code.arithmetic('mul', row, outputs))}",
            f"i64 {code.smaller(at_once, code.arithmetic('sub', rows, row))}",
            *(f"i64 {number}" for number in (part, length, stride, outputs)),
        )
        code.effect(f"call void @products({', '.join(operands)})")
    code.effect("ret void")
    return code.text()
