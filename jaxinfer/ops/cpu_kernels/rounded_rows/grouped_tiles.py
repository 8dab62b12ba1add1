"""The innermost loops of products of rows in int8 with weights whose groups have scales: 16 outputs at a time.

Four neighbouring numbers of each of 16 outputs make a vector, which is multiplied by the same four of a row. So each
lane adds the products of one output: a group's sum is whole before it is scaled, and 16 are scaled at once. Codes are
put into this order in registers, once for all rows of a tile, and lie in memory as they lay.

A sum has one order on every processor: group by group, the minimum times the sum of the row's group, then the group's
products, which are integers below 2^24, times the scale.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import BYTES, FLOATS, INTEGERS, VECTOR, dot
from jaxinfer.ops.cpu_kernels.sixteen_outputs import OUTPUTS, PART, ROWS, fours, spread_four, store_some
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# The numbers of a row that a lane multiplies by a vector of codes.
_LANE = 4
_LINE = 64
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %row_scales, ptr %y, i64 %groups, i64 %pitch, "
    "i64 %stride, i64 %sum_pitch, i64 %width, i64 %count"
)


def rows_of_tiles(vectors: Vectors) -> int:
    """Return the most rows of a tile."""
    return ROWS if vectors.dots_bytes else vectors.rows


def tile_name(rows: int) -> str:
    """Return the name of a tile."""
    return f"grouped_{rows}"


def grouped_tile(vectors: Vectors, form: Format, rows: int) -> str:
    """Return ``NAME(x, w, scales, minima, sums, row_scales, y, groups, pitch, stride, sum_pitch, width, count)``.

    It multiplies rows of x, ``pitch`` bytes apart, by 16 rows of codes, ``stride`` bytes apart, and writes ``count`` of
    the 16 outputs. Scales and minima are float32 in lines of 16, a line for each group. The sums of x's groups are
    ``sum_pitch`` apart, rows of y ``width``.
    """
    assert form.group is not None
    code = Code(f"internal void @{tile_name(rows)}({_TILE}) #0")
    steps, run_bytes = form.group // RUN, form.row_bytes(RUN)
    starts_x = [code.at("i8", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_sums = [code.at("float", "%sums", code.arithmetic("mul", "%sum_pitch", row)) for row in range(rows)]
    starts_w = [code.at("i8", "%w", code.arithmetic("mul", "%stride", output)) for output in range(OUTPUTS)]
    # The outputs after these, of which each turn fetches as many bytes as it reads.
    ahead = code.at("i8", "%w", code.arithmetic("mul", "%stride", OUTPUTS))
    totals = [f"%total{row}" for row in range(rows)]
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %next, %loop ]", "%i")
    for total in totals:
        code.value(f"phi {FLOATS} [ zeroinitializer, %entry ], [ {total}_new, %loop ]", total)
    of_x, of_w = (code.arithmetic("mul", "%i", size) for size in (form.group, steps * run_bytes))
    fetched = code.at("i8", ahead, code.arithmetic("mul", "%i", OUTPUTS * steps * run_bytes))
    for line in range(0, OUTPUTS * steps * run_bytes, _LINE):
        code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', fetched, line)}, i32 0, i32 3, i32 1)")
    products = ["zeroinitializer"] * rows
    for step in range(steps):
        codes = _codes(code, form, [code.at("i8", start, of_w) for start in starts_w], step * run_bytes)
        for row, start in enumerate(starts_x):
            place = code.at("i8", start, of_x)
            for at, numbers in enumerate(codes):
                four = spread_four(code, code.at("i8", place, step * RUN + at * _LANE))
                four = code.value(f"bitcast {INTEGERS} {four} to {BYTES}")
                products[row] = dot(code, vectors, numbers, four, products[row])
    line = code.arithmetic("mul", "%i", OUTPUTS)
    scales = code.load(FLOATS, code.at("float", "%scales", line), 4)
    minima = code.load(FLOATS, code.at("float", "%minima", line), 4) if form.has_minima else ""
    shift = 128 if form.bits == 8 else form.offset or 0
    for row, total in enumerate(totals):
        found = code.value(f"sitofp {INTEGERS} {products[row]} to {FLOATS}")
        if shift or minima:
            own_sum = vectors.spread(code, code.load_at("float", starts_sums[row], "%i"))
        if shift:
            found = vectors.multiply_add(code, vectors.constant(float(-shift)), own_sum, found)
        if minima:
            total = vectors.multiply_add(code, minima, own_sum, total)
        vectors.multiply_add(code, found, scales, total, f"{totals[row]}_new")
    code.value("add i64 %i, 1", "%next")
    code.branch(code.value("icmp slt i64 %next, %groups"), "loop", "done")
    code.start("done")
    scaled = []
    for row, total in enumerate(totals):
        scale = vectors.spread(code, code.load_at("float", "%row_scales", row))
        scaled.append(code.value(f"fmul {FLOATS} {total}_new, {scale}"))
    store_some(code, vectors, scaled)
    code.effect("ret void")
    return code.text()


def _codes(code: Code, form: Format, starts: list[str], offset: int) -> list[str]:
    """Return unsigned codes of a run: vector i has those of a row's numbers 4 i to 4 i + 3, output by output."""
    found = [fours(code, starts, offset + part) for part in range(0, form.row_bytes(RUN), PART)]
    if form.bits == 8:
        flipped = f"<{', '.join(['i8 -128'] * VECTOR)}>"
        return [code.value(f"xor {BYTES} {each}, {flipped}") for part in found for each in part]
    (packed,) = found
    fifteen, four = (f"<{', '.join([f'i8 {number}'] * VECTOR)}>" for number in (15, 4))
    low = [code.value(f"and {BYTES} {each}, {fifteen}") for each in packed]
    return [*low, *(code.value(f"lshr {BYTES} {each}, {four}") for each in packed)]
