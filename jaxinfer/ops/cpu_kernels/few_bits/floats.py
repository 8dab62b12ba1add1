"""Codes of 4 and 8 bits as float32, for processors that multiply no pairs of bfloat16.

A vector has one code of every output, and a lane's integer several of one output (`grouped_tiles`). Uneven levels are
looked up. Any other code is made a number where it lies in that integer, so what it stands for is a power of two
larger, by which the row is divided before: a mask and a conversion for 4 bits, a move of bytes and a conversion for 8.
Numbers of a row below 2^-102 count as zeros there. The sums of a row are two, of the lines of either half of each run:
so additions of one row alone need not wait for each other, and those of several rows have one sum at a time in
registers.
"""

from collections.abc import Iterable, Iterator

from jaxinfer.ops.cpu_kernels.assembly import Code, repeated_constant
from jaxinfer.ops.cpu_kernels.few_bits.tiles import rounded_levels
from jaxinfer.ops.cpu_kernels.lookups import declared_lookup, look_up
from jaxinfer.ops.cpu_kernels.sixteen_outputs import BYTES, FLOATS, INTEGERS, LANES, in_sixteen_lanes
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_BYTE, _FOUR, _UPPERMOST = 8, 4, 24
# Codes of 4 bits in an integer, of which the last is moved to the end: there it is no negative number.
_CODES = 8
_BYTES_OF_LINE = 4 * LANES
# From so many tiles on, it takes less time to widen codes once: look-ups, and conversions.
_TILES_OF_MANY_UNEVEN, _TILES_OF_MANY = 3, 8


class Floats:
    """Codes, and numbers of rows, as float32 (`grouped_tiles.Numbers`)."""

    element, vector, sums_of_row = "float", FLOATS, 2

    def __init__(self, vectors: Vectors, form: Format) -> None:
        self._vectors, self._form = in_sixteen_lanes(vectors), form
        self.rows, self.rows_of_widened = self._vectors.rows, in_sixteen_lanes(vectors, is_widened=True).rows
        self._is_uneven = form.offset is None
        self.many: int | None = (_TILES_OF_MANY_UNEVEN if self._is_uneven else _TILES_OF_MANY) * self.rows

    def functions(self) -> list[str]:
        """Return declarations, and ``arrange(x, to, runs)``.

        That has each number of x where it is multiplied, and divided by its power of two.
        """
        code = Code("internal void @arrange(ptr %x, ptr %to, i64 %runs) #0")
        before, after = f"<{RUN} x bfloat>", f"<{RUN} x float>"
        order = ", ".join(f"i32 {place}" for place in self._order())
        factors = ", ".join(f"float {2.0 ** -self._shift(at)}" for at in range(RUN))
        with code.repeated("each_run", 0, "%runs") as each:
            first = code.arithmetic("mul", each.index, RUN)
            numbers = code.load(before, code.at("bfloat", "%x", first), 2)
            numbers = code.value(f"shufflevector {before} {numbers}, {before} poison, <{RUN} x i32> <{order}>")
            numbers = code.value(f"fpext {before} {numbers} to {after}")
            numbers = _without_small(code, numbers)
            numbers = code.value(f"fmul {after} {numbers}, <{factors}>")
            code.effect(f"store {after} {numbers}, ptr {code.at('float', '%to', first)}, align 4")
        code.effect("ret void")
        return [*([declared_lookup(self._vectors.picks_by)] if self._is_uneven else []), code.text()]

    def widened(self, code: Code, lines: list[str]) -> Iterator[str]:
        """Write and return the numbers of a run's codes, one vector after the other."""
        widen = self._of_bytes if self._form.bits == _BYTE else self._of_halves
        for line in lines:
            yield from widen(code, line)

    def added(self, code: Code, run: Iterable[str], places: list[str], to: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's numbers with those at its place are added."""
        found = list(to)
        for at, numbers in enumerate(run):
            for row, place in enumerate(places):
                own = self.sums_of_row * row + self.sums_of_row * at // RUN
                number = self._vectors.spread(code, code.load("float", code.at("float", place, at)))
                found[own] = self._vectors.multiply_add(code, numbers, number, found[own])
        return found

    def _order(self) -> list[int]:
        """Return the places in a run of the numbers in the order in which they are multiplied."""
        if self._form.bits == _BYTE:
            return list(range(RUN))
        codes = [(line, code) for line in range(RUN // _CODES) for code in range(_CODES)]
        return [_FOUR * line + code // 2 + RUN // 2 * (code % 2) for line, code in codes]

    def _shift(self, at: int) -> int:
        """Return the bits below a code where it becomes a number."""
        if self._form.bits == _BYTE:
            return _UPPERMOST
        code = at % _CODES
        return 0 if self._is_uneven or code == _CODES - 1 else _FOUR * code

    def _of_halves(self, code: Code, line: str) -> list[str]:
        """Return what the codes of a line stand for, each vector one of every output."""
        whole, found = code.value(f"bitcast {BYTES} {line} to {INTEGERS}"), []
        for at in range(_CODES):
            if self._is_uneven:
                places = code.value(f"lshr {INTEGERS} {whole}, {_constant(_FOUR * at)}")
                levels = rounded_levels(self._form.levels)
                found.append(look_up(code, self._vectors.picks_by, levels, places, LANES))
                continue
            shift = self._shift(at)
            operation, operand = ("lshr", _FOUR * at) if at and not shift else ("and", 15 << shift)
            numbers = code.value(f"{operation} {INTEGERS} {whole}, {_constant(operand)}")
            if self._form.offset:
                numbers = code.value(f"sub {INTEGERS} {numbers}, {_constant(self._form.offset << shift)}")
            found.append(_converted(code, numbers))
        return found

    @staticmethod
    def _of_bytes(code: Code, line: str) -> list[str]:
        """Return 2^24 times the bytes of a line, each vector one of every output: the uppermost bytes of integers."""
        found = []
        for at in range(3):
            # Zeros come from the other vector.
            places = [_BYTES_OF_LINE if place % 4 < 3 else place - 3 + at for place in range(_BYTES_OF_LINE)]
            order = ", ".join(f"i32 {place}" for place in places)
            moved = f"{BYTES} {line}, {BYTES} zeroinitializer, <{_BYTES_OF_LINE} x i32> <{order}>"
            moved = code.value(f"shufflevector {moved}")
            found.append(code.value(f"bitcast {BYTES} {moved} to {INTEGERS}"))
        whole = code.value(f"bitcast {BYTES} {line} to {INTEGERS}")
        found.append(code.value(f"and {INTEGERS} {whole}, {_constant(0xFF << _UPPERMOST)}"))
        return [_converted(code, integers) for integers in found]


def _converted(code: Code, integers: str) -> str:
    return code.value(f"sitofp {INTEGERS} {integers} to {FLOATS}")


def _without_small(code: Code, numbers: str) -> str:
    """Return numbers, and 0 for those that divided by 2^24 have no whole mantissa: threads may differ in these."""
    floats, integers = f"<{RUN} x float>", f"<{RUN} x i32>"
    bits = code.value(f"bitcast {floats} {numbers} to {integers}")
    sizes = code.value(f"and {integers} {bits}, <{', '.join([f'i32 {0x7FFFFFFF}'] * RUN)}>")
    least = ", ".join([f"i32 {1 + _UPPERMOST << 23}"] * RUN)
    is_whole = code.value(f"icmp uge {integers} {sizes}, <{least}>")
    return code.value(f"select <{RUN} x i1> {is_whole}, {floats} {numbers}, {floats} zeroinitializer")


def _constant(number: int) -> str:
    return repeated_constant("i32", number, LANES)
