"""The innermost loops of products of rows in int8 with weights whose groups have scales: 16 outputs at a time.

Four neighbouring numbers of each of 16 outputs make a vector, which is multiplied by the same four of a row. So each
lane adds the products of one output: a group's sum is whole before it is scaled, and 16 are scaled at once. Codes are
put into this order in registers, once for all rows of a tile, and lie in memory as they lay.

A sum has one order on every processor: group by group, the minimum times the sum of the row's group, then the group's
products, which are integers below 2^24, times the scale.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import (
    BYTES,
    FLOATS,
    INTEGERS,
    VECTOR,
    ByteSums,
    added_to_codes,
    whole_bytes,
)
from jaxinfer.ops.cpu_kernels.sixteen_outputs import (
    OUTPUTS,
    PART,
    ROWS,
    each_group,
    fetch,
    fours,
    spread_four,
    store_some,
)
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# The numbers of a row that a lane multiplies by a vector of codes.
_LANE = 4
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %row_scales, ptr %y, i64 %groups, i64 %pitch, "
    "i64 %stride, i64 %sum_pitch, i64 %width, i64 %count"
)


def rows_of_tiles(vectors: Vectors) -> int:
    """Return the most rows of a tile."""
    return ROWS if vectors.dots_bytes == VECTOR else vectors.rows


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
    shift = added_to_codes(vectors, form)
    with each_group(code, vectors, form, rows, "i8") as group:
        products = ByteSums(code, vectors, form.bits, ["zeroinitializer"] * rows)
        fetch(code, group.ahead, OUTPUTS * form.row_bytes(form.group))
        for step in range(form.group // RUN):
            codes = _codes(code, vectors, form, group.w, step * form.row_bytes(RUN))
            for at, numbers in enumerate(codes):
                for row, place in enumerate(group.x):
                    four = spread_four(code, code.at("i8", place, step * RUN + at * _LANE))
                    four = code.value(f"bitcast {INTEGERS} {four} to {BYTES}")
                    products.add(row, numbers, four)
        group.found = [code.value(f"sitofp {INTEGERS} {each} to {FLOATS}") for each in products.totals()]
        if shift:
            taken = vectors.constant(float(-shift))
            sums = [vectors.spread(code, code.load("float", each)) for each in group.sums]
            group.found = [
                vectors.multiply_add(code, taken, each, found) for each, found in zip(sums, group.found, strict=True)
            ]
    scaled = []
    for row, total in enumerate(group.totals):
        scale = vectors.spread(code, code.load_at("float", "%row_scales", row))
        scaled.append(code.value(f"fmul {FLOATS} {total}, {scale}"))
    store_some(code, vectors, scaled)
    code.effect("ret void")
    return code.text()


def _codes(code: Code, vectors: Vectors, form: Format, starts: list[str], offset: int) -> list[str]:
    """Return a run's codes as they are multiplied: vector i has those of a row's numbers 4 i to 4 i + 3 by outputs."""
    found = [fours(code, starts, offset + part) for part in range(0, form.row_bytes(RUN), PART)]
    if form.bits == 8:
        return [whole_bytes(code, vectors, each) for part in found for each in part]
    (packed,) = found
    fifteen, four = (f"<{', '.join([f'i8 {number}'] * VECTOR)}>" for number in (15, 4))
    low = [code.value(f"and {BYTES} {each}, {fifteen}") for each in packed]
    return [*low, *(code.value(f"lshr {BYTES} {each}, {four}") for each in packed)]
