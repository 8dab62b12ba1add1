"""The innermost loops of products with integers of 8 bits, or codes of 4 bits in groups: 16 outputs at a time.

A lane adds the products of one output of 16 (`sixteen_outputs`), of which each integer of a line has four bytes. Codes
become `Numbers` that the processor multiplies: `pairs.Pairs` of bfloat16, or `floats.Floats`. A sum's order is group by
group, of which a whole row may be one: the minimum times the sum of the row's group, then the group's products times
the scale.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.floats import Floats
from jaxinfer.ops.cpu_kernels.few_bits.pairs import Pairs
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.cpu_kernels.sixteen_outputs import (
    FLOATS,
    LANES,
    LINE,
    OUTPUTS,
    PART,
    added_runs,
    each_group,
    fetch,
    fours,
    store_some,
    times,
)
from jaxinfer.ops.cpu_kernels.tiles import SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %y, i64 %groups, i64 %pitch, i64 %stride, "
    "i64 %sum_pitch, i64 %width, i64 %count"
)


@runtime_checkable
class Numbers(Protocol):
    """What codes become, and what rows are multiplied as: numbers of LLVM's type ``element``, 64 bytes in a ``vector``.

    The products of a row are added to ``sums_of_row`` vectors. A tile has up to ``rows`` rows. Of ``many`` rows (None:
    of no number), codes are widened once for all tiles, which then have up to ``rows_of_widened``.
    """

    element: str
    vector: str
    sums_of_row: int
    rows: int
    many: int | None
    rows_of_widened: int

    def functions(self) -> list[str]:
        """Return declarations, and ``arrange(x, to, runs)``: runs of bfloat16 as tiles multiply them."""
        ...

    def widened(self, code: Code, lines: list[str]) -> Iterator[str]:
        """Write and return the numbers of a run's codes, one vector after the other."""
        ...

    def added(self, code: Code, run: Iterable[str], places: list[str], to: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's numbers with those at its place are added."""
        ...


def has_grouped_tiles(vectors: Vectors, form: Format) -> bool:
    """Whether products with weights of this form are computed 16 outputs at a time."""
    if form.kept is not None or (form.group or RUN) % RUN or not supports(vectors, form):
        return False
    if form.bits == 4 and form.group is not None:
        return form.offset is not None or vectors.pairs_bfloat16 or bool(vectors.picks_by)
    return form.bits == 8 and not form.levels


def numbers_of(vectors: Vectors, form: Format) -> Numbers:
    """Return what codes of a form become on a processor; check `has_grouped_tiles` first."""
    return Pairs(vectors, form) if vectors.pairs_bfloat16 else Floats(vectors, form)


def added_up(code: Code, numbers: Numbers, sums: list[str]) -> list[str]:
    """Return a sum of each row, of its ``sums_of_row``."""
    if numbers.sums_of_row == 1:
        return sums
    return [code.value(f"fadd {FLOATS} {one}, {other}") for one, other in zip(sums[::2], sums[1::2])]


def lines_of_run(code: Code, run: int | str, form: Format) -> list[str]:
    """Return the lines of a run of 16 rows of codes, ``%stride`` bytes apart from ``%w`` on."""
    starts = [code.at("i8", "%w", code.arithmetic("mul", "%stride", output)) for output in range(OUTPUTS)]
    return _lines(code, starts, run, form)


def _lines(code: Code, starts: list[str], run: int | str, form: Format) -> list[str]:
    """Return the lines of a run of the rows of codes that begin there."""
    first = times(code, run, form.row_bytes(RUN))
    starts = [code.at("i8", start, first) for start in starts]
    return [line for part in range(0, form.row_bytes(RUN), PART) for line in fours(code, starts, part)]


def widened_bytes(numbers: Numbers) -> int:
    """Return how many bytes the numbers of a run of 16 outputs have."""
    return RUN * LANES * SIZES[numbers.element]


def widened_run(code: Code, numbers: Numbers, start: str, run: int | str) -> Iterator[str]:
    """Load and return the numbers of a run that ``widen`` wrote (`many_rows`), one vector after the other."""
    first = code.at("i8", start, times(code, run, widened_bytes(numbers)))
    for place in range(0, widened_bytes(numbers), LINE):
        yield code.load(numbers.vector, code.at("i8", first, place), SIZES[numbers.element])


def tile_name(rows: int, is_widened: bool) -> str:
    """Return the name of a tile."""
    return f"grouped_few_bits_{rows}{'_widened' if is_widened else ''}"


def grouped_tile(vectors: Vectors, form: Format, numbers: Numbers, rows: int, is_widened: bool) -> str:
    """Return ``NAME(x, w, scales, minima, sums, y, groups, pitch, stride, sum_pitch, width, count)``.

    It multiplies rows of x, ``pitch`` numbers apart and as ``arrange`` writes them, by 16 rows of codes, ``stride``
    bytes apart, or by what ``widen`` wrote of them, and writes ``count`` of the 16 outputs. Scales and minima are
    float32 in lines of 16, a line for each group. The sums of x's groups are ``sum_pitch`` apart, rows of y ``width``.
    """
    code, run_bytes = Code(f"internal void @{tile_name(rows, is_widened)}({_TILE}) #0"), form.row_bytes(RUN)
    with each_group(code, vectors, form, rows, numbers.element) as group:

        def add(run: int | str, found: list[str]) -> list[str]:
            places = [code.at(numbers.element, place, times(code, run, RUN)) for place in group.x]
            if is_widened:
                widened = widened_run(code, numbers, "%w", code.arithmetic("add", group.first, run))
                return numbers.added(code, widened, places, found)
            fetch(code, code.at("i8", group.ahead, times(code, run, OUTPUTS * run_bytes)), OUTPUTS * run_bytes)
            lines = _lines(code, group.w, run, form)
            return numbers.added(code, numbers.widened(code, lines), places, found)

        sums = added_runs(code, group.runs, [(FLOATS, "zeroinitializer")] * (rows * numbers.sums_of_row), add)
        group.found = added_up(code, numbers, sums)
    store_some(code, vectors, group.totals)
    code.effect("ret void")
    return code.text()
