"""The assembly of products with weights in panels: rows rounded to int8, the innermost loop, the foreign function.

A vector has four neighbouring numbers of each of 16 outputs (`jaxinfer.ops.few_bits.panels`), and is multiplied by the
same four of a row: each lane adds the products of one output. A row is rounded group by group, by every piece of the
work for itself, which takes less time than to wait for each other. A sum's order is group by group: the minimum times
the row's sum of the group, then the group's products, which are whole numbers, times both scales.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile, chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.rounded_rows.rounding_code import DECLARED, larger_sizes, round_part, scale_of, sum_of
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import (
    BYTES,
    FLOATS,
    INTEGERS,
    LANES,
    VECTOR,
    dot,
    dot_declarations,
    widened,
)
from jaxinfer.ops.cpu_kernels.sixteen_outputs import OUTPUTS, ROWS, declarations, spread_four, store_some
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# Every piece rounds all rows, so there are few of them.
_PIECES_PER_THREAD = 2
# How many bytes of codes are fetched before they are read.
_AHEAD = 2048
_SHARED = ("x", "rows", "length", "span")
_POINTERS, _INTEGERS = ("codes", "scales", "y"), ("outputs", "first_piece")
_TILE = "ptr %x, ptr %row_scales, ptr %w, ptr %scales, ptr %y, i64 %groups, i64 %length, i64 %width, i64 %count"


def panel_module(vectors: Vectors, form: Format, row_dtype: str, count: int) -> str:
    """Return the assembly of ``handler(x [M, K], codes [P, G, B], scales [P, G or 1, S], ...) -> y [M, N], ...``.

    There are ``count`` matrices, each with its own N and the arrays of a `PanelArray`; x is bfloat16 or float32, y
    float32.
    """
    vectors = widened(vectors)
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record = Record(*names)

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, *matrices = arguments
        rows, length = x.shape(code, 2)
        outputs = [y.shape(code, 2)[1] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.arithmetic("mul", threads, _PIECES_PER_THREAD)
        panels = code.ceiling(code.ceiling(all_outputs, OUTPUTS), wanted)
        span = code.arithmetic("mul", panels, OUTPUTS)
        pieces = [code.ceiling(each, span) for each in outputs]
        pointers, numbers = {"x": x.numbers}, {"rows": rows, "length": length, "span": span}
        for index, y in enumerate(results):
            codes, scales = matrices[2 * index : 2 * index + 2]
            pointers |= {f"{name}{index}": each.numbers for name, each in zip(_POINTERS, (codes, scales, y))}
            numbers |= {f"outputs{index}": outputs[index], f"first_piece{index}": code.total(pieces[:index])}
        return Plan(pointers, numbers, code.total(pieces), code.arithmetic("mul", all_outputs, length))

    tiles = [_tile(vectors, form, rows) for rows in range(1, ROWS + 1)]
    functions = [dot_declarations(vectors), declarations(), DECLARED, *tiles, _round_function(vectors, row_dtype)]
    functions.append(_piece(record, form, count))
    return make_module(vectors, functions, record, (1 + 2 * count, count), plan)


def _tile_name(rows: int) -> str:
    return f"panel_{rows}"


def _tile(vectors: Vectors, form: Format, rows: int) -> str:
    """Return ``NAME(x, row_scales, w, scales, y, groups, length, width, count)``: the products with one panel.

    Rows of x have ``length`` bytes, of scales and sums two float32 for each of ``groups``; ``count`` of the 16 outputs
    are written to each row of y, which are ``width`` apart.
    """
    code = Code(f"internal void @{_tile_name(rows)}({_TILE}) #0")
    starts = [code.at("i8", "%x", code.arithmetic("mul", "%length", row)) for row in range(rows)]
    pitch = code.arithmetic("mul", "%groups", 2)
    starts_scales = [code.at("float", "%row_scales", code.arithmetic("mul", pitch, row)) for row in range(rows)]
    group_bytes, totals = OUTPUTS * form.row_bytes(RUN), [f"%total{row}" for row in range(rows)]
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %next, %loop ]", "%i")
    for total in totals:
        code.value(f"phi {FLOATS} [ zeroinitializer, %entry ], [ {total}, %loop ]", f"{total}_old")
    w = code.at("i8", "%w", code.arithmetic("mul", "%i", group_bytes))
    places = [code.at("i8", start, code.arithmetic("mul", "%i", RUN)) for start in starts]
    products = ["zeroinitializer"] * rows
    for line in range(group_bytes // VECTOR):
        code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', w, _AHEAD + VECTOR * line)}, i32 0, i32 3, i32 1)")
        for at, numbers in _codes(code, form, code.load(BYTES, code.at("i8", w, VECTOR * line), 1), line):
            for row, place in enumerate(places):
                four = code.value(f"bitcast {INTEGERS} {spread_four(code, code.at('i8', place, at))} to {BYTES}")
                products[row] = dot(code, vectors, numbers, four, products[row])
    scales, minima = _scales(code, vectors, form)
    for start, found, total in zip(starts_scales, products, totals, strict=True):
        own = code.at("float", start, code.arithmetic("mul", "%i", 2))
        scale, row_sum = (vectors.spread(code, code.load_at("float", own, at)) for at in (0, 1))
        before = vectors.multiply_add(code, minima, row_sum, f"{total}_old")
        scale = code.value(f"fmul {FLOATS} {scales}, {scale}")
        whole = code.value(f"sitofp {INTEGERS} {found} to {FLOATS}")
        vectors.multiply_add(code, whole, scale, before, total)
    code.value("add i64 %i, 1", "%next")
    code.branch(code.value("icmp slt i64 %next, %groups"), "loop", "done")
    code.start("done")
    store_some(code, vectors, totals)
    code.effect("ret void")
    return code.text()


def _scales(code: Code, vectors: Vectors, form: Format) -> tuple[str, str]:
    """Return the scales of the panel's outputs in group ``%i``, and what a code of zero stands for."""
    element = LLVM_TYPES[form.scale_dtype]
    kind, lines = f"<{LANES} x {element}>", 1 + form.has_minima
    start = (
        "%scales" if form.group is None else code.at(element, "%scales", code.arithmetic("mul", "%i", lines * LANES))
    )
    found = [code.load(kind, code.at(element, start, line * LANES), SIZES[element]) for line in range(lines)]
    if element != "float":
        found = [code.value(f"fpext {kind} {each} to {FLOATS}") for each in found]
    if form.has_minima:
        return found[0], found[1]
    offset = 128 if form.bits == 8 else form.offset or 0
    return found[0], code.value(f"fmul {FLOATS} {found[0]}, {vectors.constant(float(-offset))}")


def _codes(code: Code, form: Format, line: str, index: int) -> list[tuple[int, str]]:
    """Return the unsigned codes of a line, each vector with the place in a group of the four numbers that it has."""
    if form.bits == 8:
        flipped = f"<{', '.join(['i8 -128'] * VECTOR)}>"
        return [(4 * index, code.value(f"xor {BYTES} {line}, {flipped}"))]
    fifteen, four = (f"<{', '.join([f'i8 {number}'] * VECTOR)}>" for number in (15, 4))
    low, high = code.value(f"and {BYTES} {line}, {fifteen}"), code.value(f"lshr {BYTES} {line}, {four}")
    return [(4 * index, low), (RUN // 2 + 4 * index, high)]


def _round_function(vectors: Vectors, row_dtype: str) -> str:
    """Return ``round(x, codes, scales, groups)``: bytes of each group, its scale, and its sum times that."""
    code = Code("internal void @round(ptr %x, ptr %codes, ptr %scales, i64 %groups) #0")
    element = LLVM_TYPES[row_dtype]
    kind, parts = f"<{LANES} x {element}>", range(0, RUN, LANES)
    with code.repeated("each_group", 0, "%groups") as each:
        first = code.arithmetic("mul", each.index, RUN)
        place = code.at(element, "%x", first)
        numbers = [code.load(kind, code.at(element, place, part), SIZES[element]) for part in parts]
        if element != "float":
            numbers = [code.value(f"fpext {kind} {part} to {FLOATS}") for part in numbers]
        sizes, total = "zeroinitializer", "zeroinitializer"
        for part in numbers:
            sizes = larger_sizes(code, part, sizes)
        scale, divisor = scale_of(code, vectors, sizes)
        codes = code.at("i8", "%codes", first)
        for at, part in zip(parts, numbers):
            rounded = round_part(code, part, divisor, code.at("i8", codes, at))
            total = code.value(f"add {INTEGERS} {total}, {rounded}")
        own = code.at("float", "%scales", code.arithmetic("mul", each.index, 2))
        code.store_at("float", scale, own, 0)
        code.store_at("float", code.value(f"fmul float {sum_of(code, total)}, {scale}"), own, 1)
    code.effect("ret void")
    return code.text()


def _piece(record: Record, form: Format, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x = record.pointer(code, "x")
    rows, length, span = (record.number(code, each) for each in _SHARED[1:])
    w, scales, y, outputs, first_piece = chosen_matrix(code, record, count, "%index", _POINTERS, _INTEGERS)
    first = code.arithmetic("mul", code.arithmetic("sub", "%index", first_piece), span)
    past = code.smaller(code.arithmetic("add", first, span), outputs)
    groups = code.arithmetic("sdiv", length, RUN)
    # Of each row's group, its scale and its sum.
    pitch = code.arithmetic("mul", groups, 2)
    all_codes = code.arithmetic("mul", rows, length)
    size = code.arithmetic("mul", code.arithmetic("mul", rows, pitch), SIZES["float"])
    codes = code.value(f"call ptr @malloc(i64 {code.arithmetic('add', all_codes, size)})")
    row_scales = code.at("i8", codes, all_codes)
    call_tile(code, "@round", (x, codes, row_scales), (code.arithmetic("mul", groups, rows),))
    # A panel's scales and minima, an output's codes.
    of_scales = code.arithmetic("mul", "1" if form.group is None else groups, 1 + form.has_minima)
    row_bytes = code.arithmetic("mul", groups, form.row_bytes(RUN))
    with code.repeated("each_panel", first, past, OUTPUTS) as panel:
        panel_w = code.at("i8", w, code.arithmetic("mul", panel.index, row_bytes))
        panel_scales = code.at(LLVM_TYPES[form.scale_dtype], scales, code.arithmetic("mul", panel.index, of_scales))
        some = code.smaller(code.arithmetic("sub", past, panel.index), OUTPUTS)
        with each_tile(code, even_tiles(code, rows, ROWS)) as (_, row, rows_here):
            tile = chosen_tile(code, rows_here, ROWS, lambda number: f"@{_tile_name(number)}")
            pointers = (
                code.at("i8", codes, code.arithmetic("mul", row, length)),
                code.at("float", row_scales, code.arithmetic("mul", row, pitch)),
                panel_w,
                panel_scales,
                code.at("float", y, code.arithmetic("add", code.arithmetic("mul", row, outputs), panel.index)),
            )
            call_tile(code, tile, pointers, (groups, length, outputs, some))
    code.effect(f"call void @free(ptr {codes})")
    code.effect("ret void")
    return code.text()
