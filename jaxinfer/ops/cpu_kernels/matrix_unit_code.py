"""The assembly of bfloat16 products in a processor's matrix unit (Intel's AMX), for one row or any number of them.

The unit has eight registers, tiles, of up to 16 lines of 64 bytes. Its instruction adds to a tile of float32 sums, [16
outputs, 16 rows], the products of 32 numbers of 16 rows of weights and of 16 rows of x. A sum stays in one place from
the first number of a row to the last, so a row's results depend on the row and on the weights alone.

A tile of weights is what lies in memory. A tile of x has, pair by pair of numbers, those of all its rows. The first
pieces of a call pack x that way; the others wait for them. A single row is packed as it is.
"""

import itertools

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module, wait_for
from jaxinfer.ops.cpu_kernels.product_code import OF_MATRIX
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# Several pieces per thread even out the threads' other work.
_PIECES_PER_THREAD = 4
# The lines of a tile, a line's bytes and bfloat16 numbers, and the bytes of a tile.
_LINES, _LINE, _NUMBERS = 16, 64, 32
_TILE = _LINES * _LINE
# The registers: four of sums, two of weights, two of x.
_SUMS, _WEIGHTS, _X = (0, 1, 2, 3), (4, 5), (6, 7)
# The numbers of x that stay in a core's cache while weights pass by.
_CACHED = 1 << 19

_SHARED = "x", "packed", "rows", "length", "groups", "first_batch", "per_group", "span", "packs"
_DECLARATIONS = """\
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""


def scratch_numbers(items: int, rows: int, length: int) -> int:
    """Return the bfloat16 numbers of a call's scratch, the packed rows."""
    return items * -(-rows // _LINES) * _LINES * length


def matrix_module(vectors: Vectors, count: int = 1) -> str:
    """Return the assembly of ``handler(x [I, M, K], l, w [L, B, S, F], ...) -> y [I, M, N], ..., scratch``.

    All is as in `product_code.dot_module` with bfloat16, for K a multiple of 32. The scratch has `scratch_numbers`.
    """
    record = Record(*_SHARED, *(f"{each}{matrix}" for matrix in range(count) for each in OF_MATRIX))

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, layer, *matrices = arguments
        *products, scratch = results
        items, rows, length = x.shape(code, 3)
        layers, batches = matrices[0].shape(code, 2)
        outputs = [y.shape(code, 3)[2] for y in products]
        all_outputs = code.total(outputs)
        wanted = code.ceiling(code.arithmetic("mul", threads, _PIECES_PER_THREAD), items)
        unit = 2 * _LINES
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), unit), unit)
        pieces = [code.ceiling(each, span) for each in outputs]
        per_group = code.total(pieces)
        tiles = code.ceiling(rows, _LINES)
        all_tiles = code.arithmetic("mul", items, tiles)
        is_single = code.value(f"icmp eq i64 {rows}, 1")
        packs = code.value(f"select i1 {is_single}, i64 0, i64 {all_tiles}")
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
        # Many rows take as long as more weights.
        weights = code.arithmetic("mul", all_tiles, code.arithmetic("mul", all_outputs, length))
        return Plan(pointers, numbers, code.arithmetic("add", packs, code.arithmetic("mul", items, per_group)), weights)

    shared = [_DECLARATIONS, _turn(), _pack(record), _configure("configure", _LINE), _finish()]
    sums = [_sums(outputs, rows) for outputs, rows in itertools.product((1, 2), (1, 2))]
    functions = [*shared, *sums, _products(), _products_of_one(), _piece(record, count, vectors.pause)]
    return make_module(vectors, functions, record, (2 + count, count + 1), plan)


def _piece(record: Record, count: int, pause: str) -> str:
    """Return ``piece(record, index)``, which packs a tile's rows, or computes some outputs for all rows of one x."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x, packed = (record.pointer(code, name) for name in ("x", "packed"))
    rows, length, groups, first_batch, per_group, span, packs = (record.number(code, each) for each in _SHARED[2:])
    code.branch(code.value(f"icmp slt i64 %index, {packs}"), "pack", "multiply")
    code.start("pack")
    code.effect("call void @pack(ptr %record, i64 %index)")
    code.effect("ret void")
    code.start("multiply")
    wait_for(code, "%record", packs, pause, "packs")
    place = code.arithmetic("sub", "%index", packs)
    which = code.arithmetic("sdiv", place, per_group)
    among = code.arithmetic("srem", place, per_group)
    w, y, outputs, stride, lines, first_piece = chosen_matrix(code, record, count, among, OF_MATRIX[:2], OF_MATRIX[2:])
    first = code.arithmetic("mul", code.arithmetic("sub", among, first_piece), span)
    width = code.smaller(span, code.arithmetic("sub", outputs, first))
    padded = code.arithmetic("mul", code.ceiling(rows, _LINES), _LINES)
    of_x = code.arithmetic("mul", which, code.arithmetic("mul", padded, length))
    of_y = code.arithmetic("mul", which, code.arithmetic("mul", rows, outputs))
    batch = code.arithmetic("add", first_batch, code.arithmetic("sdiv", which, groups))
    group = code.arithmetic("srem", which, groups)
    line = code.arithmetic("add", code.arithmetic("mul", batch, lines), first)
    of_w = code.arithmetic("add", code.arithmetic("mul", line, stride), code.arithmetic("mul", group, length))
    all_x = code.at("bfloat", packed, of_x)
    all_y = code.at("float", y, code.arithmetic("add", of_y, first))
    this_w = code.at("bfloat", w, of_w)
    code.branch(code.value(f"icmp eq i64 {rows}, 1"), "one", "many")
    code.start("one")
    only_x = code.at("bfloat", x, code.arithmetic("mul", which, length))
    numbers = f"i64 {width}, i64 {length}, i64 {stride}"
    code.effect(f"call void @products_of_one(ptr {only_x}, ptr {this_w}, ptr {all_y}, {numbers})")
    code.effect("ret void")
    code.start("many")
    unit = 2 * _LINES
    part = code.larger(code.arithmetic("and", code.arithmetic("sdiv", _CACHED, length), -unit), unit)
    with code.repeated("part", 0, code.ceiling(rows, part)) as one:
        row = code.arithmetic("mul", one.index, part)
        this_x = code.at("bfloat", all_x, code.arithmetic("mul", row, length))
        this_y = code.at("float", all_y, code.arithmetic("mul", row, outputs))
        some = code.smaller(part, code.arithmetic("sub", rows, row))
        numbers = ", ".join(f"i64 {number}" for number in (some, width, length, stride, outputs))
        code.effect(f"call void @products(ptr {this_x}, ptr {this_w}, ptr {this_y}, {numbers})")
    code.effect("ret void")
    return code.text()


def _pack(record: Record) -> str:
    """Return ``pack(record, index)``, which packs the rows of a tile; where rows are missing, the last is repeated."""
    code = Code("internal void @pack(ptr %record, i64 %index) #0")
    x, packed = record.pointer(code, "x"), record.pointer(code, "packed")
    rows, length = record.number(code, "rows"), record.number(code, "length")
    tiles = code.ceiling(rows, _LINES)
    first = code.arithmetic("mul", code.arithmetic("srem", "%index", tiles), _LINES)
    row = code.arithmetic("add", code.arithmetic("mul", code.arithmetic("sdiv", "%index", tiles), rows), first)
    count = code.smaller(code.arithmetic("sub", rows, first), _LINES)
    start = code.at("bfloat", x, code.arithmetic("mul", row, length))
    of_tile = code.arithmetic("mul", code.arithmetic("mul", "%index", _LINES), length)
    to = code.at("bfloat", packed, of_tile)
    apart = code.arithmetic("mul", length, 2)
    with code.repeated("step", 0, length, _NUMBERS) as step:
        here = code.at("bfloat", start, step.index)
        there = code.at("bfloat", to, code.arithmetic("mul", step.index, _LINES))
        code.effect(f"call void @turn(ptr {here}, ptr {there}, i64 {apart}, i64 {_LINE}, i64 {count}, i64 {_LINES})")
    code.effect("ret void")
    return code.text()


def _turn() -> str:
    """Return ``turn(from, to, from_apart, to_apart, read, written)``, which transposes lines of 16 four-byte words.

    Lines are so many bytes apart. After the ``read`` ones, the last is repeated; ``written`` ones are written.
    """
    parameters = "ptr %from, ptr %to, i64 %from_apart, i64 %to_apart, i64 %read, i64 %written"
    code, wide, half = Code(f"internal void @turn({parameters}) #0"), f"<{_LINES} x float>", _LINES // 2
    place, lines = "%from", []
    for index in range(_LINES):
        lines.append(code.load(wide, place, 4))
        has_more = code.value(f"icmp sgt i64 %read, {index + 1}")
        place = code.at("i8", place, code.value(f"select i1 {has_more}, i64 %from_apart, i64 0"))
    masks = [
        ", ".join(f"i32 {lane}, i32 {_LINES + lane}" for lane in range(first, first + half)) for first in (0, half)
    ]
    # The words of one half are put between those of the other, like cards; after four times, lines are columns.
    for _ in range(_LINES.bit_length() - 1):
        lines = [
            code.value(f"shufflevector {wide} {one}, {wide} {other}, <{_LINES} x i32> <{mask}>")
            for one, other in zip(lines[:half], lines[half:])
            for mask in masks
        ]
    place = "%to"
    for index, line in enumerate(lines, 1):
        code.effect(f"store {wide} {line}, ptr {place}, align 4")
        place = code.at("i8", place, "%to_apart")
        code.branch(code.value(f"icmp sgt i64 %written, {index}"), f"after{index}", f"after{_LINES}")
        code.start(f"after{index}")
    code.effect("ret void")
    return code.text()


def _configure(name: str, width: int) -> str:
    """Return ``NAME(outputs)``: tiles of weights and of sums have so many lines, those of x all.

    Lines of x and of sums have ``width`` bytes, four a row; those of weights are whole.

    A configuration has 64 bytes: its kind, 1; from byte 16, the bytes of a line of each tile, as 16-bit integers; from
    byte 48, the lines of each tile.
    """
    code = Code(f"internal void @{name}(i64 %outputs) #0")
    config = code.value(f"alloca [{_LINE} x i8], align {_LINE}")
    lines = code.value("trunc i64 %outputs to i8")
    code.effect(f"store <{_LINE} x i8> zeroinitializer, ptr {config}, align {_LINE}")
    code.store_at("i8", 1, config, 0)
    for tile in (*_SUMS, *_WEIGHTS, *_X):
        code.store_at("i8", _LINE if tile in _WEIGHTS else width, config, 16 + 2 * tile)
        code.store_at("i8", _LINES if tile in _X else lines, config, 48 + tile)
    code.effect(f"call void @llvm.x86.ldtilecfg(ptr {config})")
    code.effect("ret void")
    return code.text()


def _sums(outputs: int, rows: int) -> str:
    """Return ``sums_OUTPUTSxROWS(x, w, to, length, apart)``, which computes that many tiles of sums.

    Rows of w are ``apart`` bytes apart. No weights are fetched ahead: a processor does that best by itself.
    """
    code = Code(f"internal void @sums_{outputs}x{rows}(ptr %x, ptr %w, ptr %to, i64 %length, i64 %apart) #0")
    starts_w = [code.at("i8", "%w", code.arithmetic("mul", "%apart", _LINES * output)) for output in range(outputs)]
    starts_x = [code.at("bfloat", "%x", code.arithmetic("mul", "%length", _LINES * row)) for row in range(rows)]
    tiles = list(enumerate(itertools.product(_WEIGHTS[:outputs], _X[:rows])))
    for index, _ in tiles:
        code.effect(f"call void @llvm.x86.tilezero(i8 {_SUMS[index]})")
    with code.repeated("step", 0, "%length", _NUMBERS) as step:
        packed = code.arithmetic("mul", step.index, _LINES)
        for tile, start in zip(_X, starts_x):
            code.effect(_load_tile(tile, code.at("bfloat", start, packed), _LINE))
        for tile, start in zip(_WEIGHTS, starts_w):
            code.effect(_load_tile(tile, code.at("bfloat", start, step.index), "%apart"))
        for index, (weights, x) in tiles:
            code.effect(f"call void @llvm.x86.tdpbf16ps(i8 {_SUMS[index]}, i8 {weights}, i8 {x})")
    for index, _ in tiles:
        place = code.at("i8", "%to", _TILE * index)
        code.effect(f"call void @llvm.x86.tilestored64(i8 {_SUMS[index]}, ptr {place}, i64 {_LINE})")
    code.effect("ret void")
    return code.text()


def _load_tile(tile: int, place: str, apart: str | int) -> str:
    return f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr {place}, i64 {apart})"


def _finish() -> str:
    """Return ``finish(sums, y, width, rows, outputs)``, which writes what y has of a tile of sums into rows of y."""
    code = Code("internal void @finish(ptr %sums, ptr %y, i64 %width, i64 %rows, i64 %outputs) #0")
    turned = code.value(f"alloca [{_TILE} x i8], align {_LINE}")
    apart = code.arithmetic("mul", "%width", 4)
    count = code.smaller("%rows", _LINES)
    code.branch(code.value(f"icmp sge i64 %outputs, {_LINES}"), "whole", "part")
    code.start("whole")
    code.effect(f"call void @turn(ptr %sums, ptr %y, i64 {_LINE}, i64 {apart}, i64 {_LINES}, i64 {count})")
    code.effect("ret void")
    code.start("part")
    code.effect(f"call void @turn(ptr %sums, ptr {turned}, i64 {_LINE}, i64 {_LINE}, i64 {_LINES}, i64 {count})")
    with code.repeated("row", 0, count) as row, code.repeated("output", 0, "%outputs") as output:
        line = code.at("i8", turned, code.arithmetic("mul", row.index, _LINE))
        to = code.at("i8", "%y", code.arithmetic("mul", row.index, apart))
        code.store_at("float", code.load_at("float", line, output.index), to, output.index)
    code.effect("ret void")
    return code.text()


def _products() -> str:
    """Return ``products(x, w, y, rows, outputs, length, stride, width)`` of packed rows; strides are in numbers."""
    parameters = "ptr %x, ptr %w, ptr %y, i64 %rows, i64 %outputs, i64 %length, i64 %stride, i64 %width"
    code = Code(f"internal void @products({parameters}) #0")
    sums = code.value(f"alloca [{len(_SUMS) * _TILE} x i8], align {_LINE}")
    apart = code.arithmetic("mul", "%stride", 2)
    # For a single tile of rows, one of outputs: of more weights at once, a processor fetches fewer ahead.
    is_many = code.value(f"icmp sgt i64 %rows, {_LINES}")
    code.effect(f"call void @configure(i64 {_LINES})")
    code.effect("br label %output")
    code.start("output")
    code.value("phi i64 [ 0, %entry ], [ %next2, %after2 ], [ %next1, %after1 ]", "%n")
    left = code.arithmetic("sub", "%outputs", "%n")
    code.branch(code.value(f"icmp sgt i64 {left}, 0"), "some", "end")
    code.start("some")
    this_w = code.at("bfloat", "%w", code.arithmetic("mul", "%n", "%stride"))
    this_y = code.at("float", "%y", "%n")
    has_two = code.value(f"icmp sge i64 {left}, {2 * _LINES}")
    code.branch(code.value(f"and i1 {is_many}, {has_two}"), "take2", "fewer")
    code.start("fewer")
    code.branch(code.value(f"icmp sge i64 {left}, {_LINES}"), "take1", "part")
    code.start("part")
    code.effect(f"call void @configure(i64 {left})")
    code.effect("br label %take1")
    for outputs in (2, 1):
        code.start(f"take{outputs}")
        with code.repeated(f"rows{outputs}", 0, "%rows", 2 * _LINES) as row:
            this_x = code.at("bfloat", "%x", code.arithmetic("mul", row.index, "%length"))
            row_y = code.at("float", this_y, code.arithmetic("mul", row.index, "%width"))
            rest = code.arithmetic("sub", "%rows", row.index)
            code.branch(code.value(f"icmp sgt i64 {rest}, {_LINES}"), f"take{outputs}x2", f"take{outputs}x1")
            for rows in (2, 1):
                code.start(f"take{outputs}x{rows}")
                operands = f"ptr {this_x}, ptr {this_w}, ptr {sums}, i64 %length, i64 {apart}"
                code.effect(f"call void @sums_{outputs}x{rows}({operands})")
                for index, (right, down) in enumerate(itertools.product(range(outputs), range(rows))):
                    below = code.at("float", row_y, code.arithmetic("mul", "%width", _LINES * down))
                    to = code.at("float", below, _LINES * right)
                    lefts = (
                        code.arithmetic("sub", rest, _LINES * down),
                        code.arithmetic("sub", left, _LINES * right),
                    )
                    numbers = f"i64 %width, i64 {lefts[0]}, i64 {lefts[1]}"
                    code.effect(f"call void @finish(ptr {code.at('i8', sums, _TILE * index)}, ptr {to}, {numbers})")
                code.effect(f"br label %taken{outputs}")
            code.start(f"taken{outputs}")
        code.value(f"add i64 %n, {_LINES * outputs}", f"%next{outputs}")
        code.effect(f"br label %after{outputs}")
        code.start(f"after{outputs}")
        code.effect("br label %output")
    code.start("end")
    code.effect("call void @llvm.x86.tilerelease()")
    code.effect("ret void")
    return code.text()


def _products_of_one() -> str:
    """Return ``products_of_one(x, w, y, outputs, length, stride)``, of one row; the stride is in numbers."""
    parameters = "ptr %x, ptr %w, ptr %y, i64 %outputs, i64 %length, i64 %stride"
    code = Code(f"internal void @products_of_one({parameters}) #0")
    apart, weights, x, sums = code.arithmetic("mul", "%stride", 2), _WEIGHTS[0], _X[0], _SUMS[0]
    code.effect(f"call void @configure_one(i64 {_LINES})")
    with code.repeated("output", 0, "%outputs", _LINES) as output:
        left = code.arithmetic("sub", "%outputs", output.index)
        code.branch(code.value(f"icmp slt i64 {left}, {_LINES}"), "few", "take")
        code.start("few")
        code.effect(f"call void @configure_one(i64 {left})")
        code.effect("br label %take")
        code.start("take")
        this_w = code.at("bfloat", "%w", code.arithmetic("mul", output.index, "%stride"))
        code.effect(f"call void @llvm.x86.tilezero(i8 {sums})")
        with code.repeated("step", 0, "%length", _NUMBERS) as step:
            code.effect(_load_tile(x, code.at("bfloat", "%x", step.index), 4))
            code.effect(_load_tile(weights, code.at("bfloat", this_w, step.index), apart))
            code.effect(f"call void @llvm.x86.tdpbf16ps(i8 {sums}, i8 {weights}, i8 {x})")
        place = code.at("float", "%y", output.index)
        code.effect(f"call void @llvm.x86.tilestored64(i8 {sums}, ptr {place}, i64 4)")
    code.effect("call void @llvm.x86.tilerelease()")
    code.effect("ret void")
    return _configure("configure_one", 4) + code.text()
