"""What tiles of 16 outputs share: four neighbouring bytes of each output make a vector, and so do its scales.

Each lane then adds the products of one output, so that the sum of a group is whole before it is scaled. Codes of four
bits, or bytes, are put into this order in registers, and lie in memory as they lay.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import OUTPUTS as TILE_OUTPUTS
from jaxinfer.ops.cpu_kernels.tiles import SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# The outputs of a tile: those of a vector, of which some processors take several for one.
OUTPUTS = LANES = 16
# The most rows of a tile: with as many sums, the codes of a run and the scales, they fit 32 registers.
ROWS = 8
# Bytes of codes that are read at a time.
PART = 16
LINE = 64
_FEW_RUNS = 2
BYTES, INTEGERS, FLOATS = f"<{4 * LANES} x i8>", f"<{LANES} x i32>", f"<{LANES} x float>"


def in_sixteen_lanes(vectors: Vectors, is_widened: bool = False) -> Vectors:
    """Return a processor's vectors with 16 lanes, of which it may take several for one.

    Their rows are those of a tile: as many sums fit its registers, and a line of codes in numbers; and, if not
    ``is_widened``, the line as it is.
    """
    rows = (vectors.rows - (not is_widened)) * TILE_OUTPUTS * vectors.lanes // LANES
    return replace(vectors, lanes=LANES, rows=min(ROWS, max(1, rows)))


def declarations() -> str:
    """Return declarations of what is called here, beyond `tiles.declarations`."""
    return f"declare void @llvm.masked.store.v{LANES}f32.p0({FLOATS}, ptr, i32 immarg, <{LANES} x i1>)\n"


@dataclass
class Group:
    """A group of a tile: where its numbers of each row and its codes of each output are, and the sums of the rows.

    ``first`` is its first run, ``ahead`` where bytes are fetched meanwhile. Where a whole row is one group, the tile
    counts its ``runs``. ``found`` are each row's products with the group before they are scaled, which the loop's body
    leaves; ``totals`` the rows' sums after the loop.
    """

    first: int | str
    x: list[str]
    w: list[str]
    ahead: str
    sums: list[str]
    runs: int | str
    totals: list[str]
    found: list[str]


@contextmanager
def each_group(code: Code, vectors: Vectors, form: Format, rows: int, kind: str) -> Iterator[Group]:
    """Append a tile's loop over groups, or over the only one.

    Its function has x of ``kind``, w, scales, minima and sums, groups, pitch, stride and sum_pitch: rows of x are
    ``pitch`` numbers apart, those of codes ``stride`` bytes, the sums of x's groups ``sum_pitch``. Scales and minima
    are float32 in lines of 16, a line for each group.
    """
    run_bytes = form.row_bytes(RUN)
    runs = form.group // RUN if form.group is not None else code.arithmetic("sdiv", "%stride", run_bytes)
    starts_x = [code.at(kind, "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_sums = [code.at("float", "%sums", code.arithmetic("mul", "%sum_pitch", row)) for row in range(rows)]
    starts_w = [code.at("i8", "%w", code.arithmetic("mul", "%stride", output)) for output in range(OUTPUTS)]
    # The outputs after these, of which each turn fetches as many bytes as it reads.
    ahead = code.at("i8", "%w", code.arithmetic("mul", "%stride", OUTPUTS))
    with code.repeated("each_group", 0, "%groups", 1, *[(FLOATS, "zeroinitializer")] * rows) as each:
        first = times(code, each.index, runs)
        of_x, of_w = times(code, first, RUN), times(code, first, run_bytes)
        group = Group(
            first,
            [code.at(kind, start, of_x) for start in starts_x],
            [code.at("i8", start, of_w) for start in starts_w],
            code.at("i8", ahead, times(code, of_w, OUTPUTS)),
            [code.at("float", start, each.index) for start in starts_sums],
            runs,
            each.all_held,
            [],
        )
        yield group
        line = code.arithmetic("mul", each.index, OUTPUTS)
        scales = code.load(FLOATS, code.at("float", "%scales", line), SIZES["float"])
        minima = code.load(FLOATS, code.at("float", "%minima", line), SIZES["float"]) if form.is_shifted else ""
        for row, (found, own_sum) in enumerate(zip(group.found, group.sums, strict=True)):
            total = each.all_held[row]
            if form.group is None and not minima:
                each.all_left[row] = code.value(f"fmul {FLOATS} {found}, {scales}")
                continue
            if minima:
                total = vectors.multiply_add(code, minima, vectors.spread(code, code.load("float", own_sum)), total)
            each.all_left[row] = vectors.multiply_add(code, found, scales, total)


def added_runs(
    code: Code, runs: int | str, sums: Sequence[tuple[str, str]], add: Callable[[int | str, list[str]], list[str]]
) -> list[str]:
    """Return sums after ``add(run, sums)`` of each run, given their types and values before them.

    A few runs are written one after the other. More, or as many as only the tile knows, are a loop, which takes less
    time to compile.
    """
    if isinstance(runs, int) and runs <= _FEW_RUNS:
        found = [value for _, value in sums]
        for run in range(runs):
            found = add(run, found)
        return found
    with code.repeated("each_run", 0, runs, 1, *sums) as each:
        each.all_left[:] = add(each.index, each.all_held)
    return each.all_held


def times(code: Code, number: int | str, factor: int | str) -> int | str:
    """Return a product, which is written only where a factor is not known."""
    if isinstance(number, int) and isinstance(factor, int):
        return number * factor
    return code.arithmetic("mul", number, factor)


def fetch(code: Code, place: str, num_bytes: int) -> None:
    """Append what brings bytes from an address on into the caches."""
    for line in range(0, num_bytes, LINE):
        code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', place, line)}, i32 0, i32 3, i32 1)")


def fours(code: Code, starts: list[str], offset: int) -> list[str]:
    """Return vectors, of which number i has bytes 4 i to 4 i + 3 of the 16 that lie ``offset`` past each start."""
    loaded = [code.load(f"<{PART} x i8>", code.at("i8", start, offset), 1) for start in starts]
    # Of outputs l, l + 4, ... for each l: a square of fours then lies in each quarter of four vectors.
    return _squares_turned(code, [_joined(code, loaded[first::4]) for first in range(4)])


def lines_of_panel(code: Code, place: str, form: Format) -> list[str]:
    """Return such vectors of a run that lies in this order at an address."""
    starts = range(0, OUTPUTS * form.row_bytes(RUN), LINE)
    return [code.load(BYTES, code.at("i8", place, start), 1) for start in starts]


def spread_four(code: Code, place: str) -> str:
    """Return the four bytes at an address sixteen times, as integers."""
    single = code.value(f"insertelement {INTEGERS} poison, i32 {code.load('i32', place, 1)}, i32 0")
    return code.value(f"shufflevector {INTEGERS} {single}, {INTEGERS} poison, <{LANES} x i32> zeroinitializer")


def store_some(code: Code, vectors: Vectors, rows: list[str]) -> None:
    """Append stores of the first ``%count`` of each row's results to ``%y``, whose rows are ``%width`` apart."""
    mask = vectors.first(code, LANES, "%count")
    for row, total in enumerate(rows):
        place = code.at("float", "%y", code.arithmetic("mul", "%width", row))
        operands = f"{FLOATS} {total}, ptr {place}, i32 4, <{LANES} x i1> {mask}"
        code.effect(f"call void @llvm.masked.store.v{LANES}f32.p0({operands})")


def whole_outputs(code: Code, w: str, copies: str, some: str, row_bytes: str) -> str:
    """Return where 16 rows of codes are: at ``w``, or where fewer are left, copied in front of any others.

    So nothing past them is read. Rows have whole numbers of `PART` bytes.
    """
    is_whole = code.value(f"icmp eq i64 {some}, {OUTPUTS}")
    copied = code.value(f"select i1 {is_whole}, i64 0, i64 {code.arithmetic('mul', some, row_bytes)}")
    with code.repeated("each_copied", 0, copied, PART) as each:
        part = code.load(f"<{PART} x i8>", code.at("i8", w, each.index), 1)
        code.effect(f"store <{PART} x i8> {part}, ptr {code.at('i8', copies, each.index)}, align 1")
    return code.value(f"select i1 {is_whole}, ptr {w}, ptr {copies}")


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


def _joined(code: Code, parts: list[str]) -> str:
    """Return parts of 16 bytes, one after the other, as a vector of four-byte integers."""
    size = PART
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
