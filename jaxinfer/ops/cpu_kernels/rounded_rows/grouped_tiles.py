"""The innermost loops of products of rows in int8 with weights whose groups have scales: 16 outputs at a time.

Four neighbouring numbers of each of 16 outputs make a vector, which is multiplied by the same four of a row. So each
lane adds the products of one output: a group's sum is whole before it is scaled, and 16 are scaled at once. Codes are
put into this order in registers, once for all rows of a tile, and lie in memory as they lay.

A sum has one order on every processor: group by group, the minimum times the sum of the row's group, then the group's
products, which are integers below 2^24, times the scale.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import BYTES, FLOATS, INTEGERS, LANES, VECTOR, dot
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# The outputs of a tile: those of a vector.
OUTPUTS = LANES
# The most rows of a tile: with as many sums, the codes of a run and the scales, they fit 32 registers.
_ROWS = 8
# Bytes of codes that are read at a time, and the numbers of a row that a lane multiplies by them.
_PART, _LANE = 16, 4
_LINE = 64
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %row_scales, ptr %y, i64 %groups, i64 %pitch, "
    "i64 %stride, i64 %sum_pitch, i64 %width, i64 %count"
)


def rows_of_tiles(vectors: Vectors) -> int:
    """Return the most rows of a tile."""
    return _ROWS if vectors.dots_bytes else vectors.rows


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
                four = code.load("i32", code.at("i8", place, step * RUN + at * _LANE), 1)
                products[row] = dot(code, vectors, numbers, _spread_four(code, four), products[row])
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
    mask = vectors.first(code, LANES, "%count")
    for row in range(rows):
        scale = vectors.spread(code, code.load_at("float", "%row_scales", row))
        found = code.value(f"fmul {FLOATS} {totals[row]}_new, {scale}")
        place = code.at("float", "%y", code.arithmetic("mul", "%width", row))
        operands = f"{FLOATS} {found}, ptr {place}, i32 4, <{LANES} x i1> {mask}"
        code.effect(f"call void @llvm.masked.store.v{LANES}f32.p0({operands})")
    code.effect("ret void")
    return code.text()


def turn_function() -> str:
    """Return ``turn(from, to, padded)``: 16 lines of ``padded`` float32 become ``padded`` lines of 16."""
    code = Code("internal void @turn(ptr %from, ptr %to, i64 %padded) #0")
    with code.repeated("each_square", 0, "%padded", LANES) as each:
        start = code.at("float", "%from", each.index)
        lines = [
            code.load(FLOATS, code.at("float", start, code.arithmetic("mul", "%padded", line)), 4)
            for line in range(LANES)
        ]
        to = code.at("float", "%to", code.arithmetic("mul", each.index, LANES))
        for line, numbers in enumerate(_turned(code, lines)):
            code.effect(f"store {FLOATS} {numbers}, ptr {code.at('float', to, LANES * line)}, align 4")
    code.effect("ret void")
    return code.text()


def declarations() -> str:
    """Return declarations of what the tiles call, beyond `tiles.declarations`."""
    return f"declare void @llvm.masked.store.v{LANES}f32.p0({FLOATS}, ptr, i32 immarg, <{LANES} x i1>)\n"


def _codes(code: Code, form: Format, starts: list[str], offset: int) -> list[str]:
    """Return unsigned codes of a run: vector i has those of a row's numbers 4 i to 4 i + 3, output by output."""
    found = []
    for part in range(offset, offset + form.row_bytes(RUN), _PART):
        loaded = [code.load(f"<{_PART} x i8>", code.at("i8", start, part), 1) for start in starts]
        # Of outputs l, l + 4, ... for each l: a square of fours then lies in each quarter of four vectors.
        quarters = [_joined(code, loaded[first::_LANE]) for first in range(_LANE)]
        found.append(_squares_turned(code, quarters))
    if form.bits == 8:
        flipped = f"<{', '.join(['i8 -128'] * VECTOR)}>"
        return [code.value(f"xor {BYTES} {each}, {flipped}") for part in found for each in part]
    (packed,) = found
    fifteen, four = (f"<{', '.join([f'i8 {number}'] * VECTOR)}>" for number in (15, 4))
    low = [code.value(f"and {BYTES} {each}, {fifteen}") for each in packed]
    return [*low, *(code.value(f"lshr {BYTES} {each}, {four}") for each in packed)]


def _joined(code: Code, parts: list[str]) -> str:
    """Return parts of 16 bytes, one after the other, as a vector of four-byte integers."""
    size = _PART
    while len(parts) > 1:
        order = ", ".join(f"i32 {at}" for at in range(2 * size))
        parts = [
            code.value(f"shufflevector <{size} x i8> {one}, <{size} x i8> {other}, <{2 * size} x i32> <{order}>")
            for one, other in zip(parts[::2], parts[1::2])
        ]
        size *= 2
    return code.value(f"bitcast {BYTES} {parts[0]} to {INTEGERS}")


def _squares_turned(code: Code, vectors: list[str]) -> list[str]:
    """Turn the square of four numbers that lies in each quarter of four vectors; return vectors of bytes."""
    quarters = range(0, LANES, 4)

    def shuffled(one: str, other: str, lanes: tuple[int, ...]) -> str:
        # Lanes of a quarter; in a shuffle, those of the other vector are numbered after all of the first.
        places = [quarter + lane % 4 + LANES * (lane // 4) for quarter in quarters for lane in lanes]
        return _shuffle(code, INTEGERS, one, other, places)

    first, second, third, fourth = vectors
    turned = []
    for lanes in ((0, 4, 1, 5), (2, 6, 3, 7)):
        one, other = shuffled(first, second, lanes), shuffled(third, fourth, lanes)
        turned += [shuffled(one, other, pairs) for pairs in ((0, 1, 4, 5), (2, 3, 6, 7))]
    return [code.value(f"bitcast {INTEGERS} {each} to {BYTES}") for each in turned]


def _turned(code: Code, lines: list[str]) -> list[str]:
    """Turn a square of 16 vectors: number i of line j becomes number j of line i."""
    distance = 1
    while distance < LANES:
        for line in range(LANES):
            if line & distance:
                continue
            one, other = lines[line], lines[line + distance]
            for to, upper in ((line, 0), (line + distance, distance)):
                places = [(lane & ~distance) + upper + (LANES if lane & distance else 0) for lane in range(LANES)]
                lines[to] = _shuffle(code, FLOATS, one, other, places)
        distance *= 2
    return lines


def _shuffle(code: Code, kind: str, one: str, other: str, places: list[int]) -> str:
    mask = ", ".join(f"i32 {place}" for place in places)
    return code.value(f"shufflevector {kind} {one}, {kind} {other}, <{LANES} x i32> <{mask}>")


def _spread_four(code: Code, four: str) -> str:
    """Return four bytes, given as an integer, sixteen times."""
    single = code.value(f"insertelement {INTEGERS} poison, i32 {four}, i32 0")
    spread = code.value(f"shufflevector {INTEGERS} {single}, {INTEGERS} poison, <{LANES} x i32> zeroinitializer")
    return code.value(f"bitcast {INTEGERS} {spread} to {BYTES}")
