"""Codes that are widened once for all tiles of many rows, 16 outputs at a time.

Tiles of few rows widen them in registers. The sums are the same (`grouped_tiles`).
"""

from collections.abc import Callable

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import Numbers, widened_bytes
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile, chosen_tile, even_tiles
from jaxinfer.ops.cpu_kernels.sixteen_outputs import LINE
from jaxinfer.ops.cpu_kernels.tiles import SIZES


def widen_functions(numbers: Numbers, read: Callable[[Code, str], list[str]]) -> list[str]:
    """Return ``widen(w, to, runs, stride)``, which writes the numbers of 16 outputs' codes, if many rows need it.

    ``read(code, run)`` returns a run's lines of w; it may use ``%stride``.
    """
    if numbers.many is None:
        return []
    code = Code("internal void @widen(ptr %w, ptr %to, i64 %runs, i64 %stride) #0")
    with code.repeated("each_run", 0, "%runs") as each:
        to = code.at("i8", "%to", code.arithmetic("mul", each.index, widened_bytes(numbers)))
        for at, vector in enumerate(numbers.widened(code, read(code, each.index))):
            place = code.at("i8", to, LINE * at)
            code.effect(f"store {numbers.vector} {vector}, ptr {place}, align {SIZES[numbers.element]}")
    code.effect("ret void")
    return [code.text()]


def row_counts(numbers: Numbers) -> list[tuple[int, bool]]:
    """Return how many rows tiles may have, each with whether codes are widened before."""
    few = [(rows, False) for rows in range(1, numbers.rows + 1)]
    return few if numbers.many is None else [*few, *((rows, True) for rows in _of_many(numbers, numbers.many))]


class RowsOfTiles:
    """How tiles go over rows, and whether these are many."""

    def __init__(self, code: Code, numbers: Numbers, rows: str) -> None:
        self._code, self._numbers = code, numbers
        if numbers.many is None:
            self._is_many, self.tiles = "false", even_tiles(code, rows, numbers.rows)
            return
        self._is_many = code.value(f"icmp sge i64 {rows}, {numbers.many}")
        most = code.value(f"select i1 {self._is_many}, i64 {numbers.rows_of_widened}, i64 {numbers.rows}")
        self.tiles = even_tiles(code, rows, most)

    def if_many(self, number: str) -> str:
        """Return a number, or 0 where rows are not many."""
        return self._code.value(f"select i1 {self._is_many}, i64 {number}, i64 0")

    def num_bytes(self, runs: str) -> str:
        """Return the memory that the numbers of so many runs of 16 outputs take."""
        return self.if_many(self._code.arithmetic("mul", runs, widened_bytes(self._numbers)))

    def codes(self, w: str, to: str, runs: str, stride: str) -> str:
        """Return where tiles read 16 outputs of w: there, or where ``widen`` wrote them."""
        if self._numbers.many is None:
            return w
        call_tile(self._code, "@widen", (w, to), (self.if_many(runs), stride))
        return self._code.value(f"select i1 {self._is_many}, ptr {to}, ptr {w}")

    def tile(self, rows: str, name: Callable[[int, bool], str]) -> str:
        """Return the address of the tile for some rows, given names by number and by whether codes are widened."""
        direct = chosen_tile(self._code, rows, self._numbers.rows, lambda count: f"@{name(count, False)}")
        if self._numbers.many is None:
            return direct
        many = _of_many(self._numbers, self._numbers.many)
        widened = chosen_tile(self._code, rows, many[-1], lambda count: f"@{name(count, True)}", many[0])
        return self._code.value(f"select i1 {self._is_many}, ptr {widened}, ptr {direct}")


def _of_many(numbers: Numbers, first: int) -> range:
    """Return how many rows a tile may have, of ``first`` rows or more."""
    most = numbers.rows_of_widened
    # The fewer tiles there are, the more their rows differ.
    return range(min(rows // -(-rows // most) for rows in range(first, first + most**2)), most + 1)
