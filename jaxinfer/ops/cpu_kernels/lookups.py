"""Numbers out of a table of constants by their places in it, which some processors pick by one instruction."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code, float_constant, repeated_constant


class _Picking(NamedTuple):
    """An LLVM function that picks ``lanes`` float32 out of ``numbers``: by places, or by the places of their bytes."""

    function: str
    lanes: int
    numbers: int
    by_bytes: bool = False


_BYTES = "<16 x i8>"
# By the names that `tiles.Vectors.picks_by` has. Those by places read their lowest bits alone.
_PICKING = {
    "avx2": _Picking("@llvm.x86.avx2.permps", 8, 8),
    "avx512": _Picking("@llvm.x86.avx512.permvar.sf.512", 16, 16),
    "neon": _Picking("@llvm.aarch64.neon.tbl4.v16i8", 4, 16, True),
}


def declared_lookup(picks_by: str) -> str:
    """Return the declaration of what `look_up` calls."""
    function, lanes, _, by_bytes = _PICKING[picks_by]
    if by_bytes:
        return f"declare {_BYTES} {function}({', '.join([_BYTES] * 5)})\n"
    return f"declare <{lanes} x float> {function}(<{lanes} x float>, <{lanes} x i32>)\n"


def look_up(code: Code, picks_by: str, table: Sequence[float], places: str, lanes: int) -> str:
    """Return the numbers of a table at some places, an integer in each of ``lanes`` lanes.

    The table has 16, 32 or 64 numbers. Above the bits of a place may be any others.
    """
    picking = _PICKING[picks_by]
    parts = []
    for first in range(0, lanes, picking.lanes):
        # Where there are fewer lanes than an instruction has, the others get places of no meaning.
        order = [first + lane for lane in range(picking.lanes)]
        own = _shuffled(code, "i32", lanes, places, [at if at < lanes else first for at in order])
        parts.append(_picked(code, picks_by, table, own))
    found, size = parts[0], picking.lanes
    if lanes < size:
        return _shuffled(code, "float", size, found, list(range(lanes)))
    while len(parts) > 1:
        parts = [_joined(code, size, one, other) for one, other in zip(parts[::2], parts[1::2])]
        size *= 2
    return parts[0]


def _picked(code: Code, picks_by: str, table: Sequence[float], places: str) -> str:
    """Return the numbers at the places of one instruction's lanes: of each part of the table, then those of the right.

    A bit of places tells parts apart; where it is the uppermost one of an integer, processors need no comparison.
    """
    picking = _PICKING[picks_by]
    integers, floats = f"<{picking.lanes} x i32>", f"<{picking.lanes} x float>"
    found = [
        _of_part(code, picks_by, table[first : first + picking.numbers], places)
        for first in range(0, len(table), picking.numbers)
    ]
    bit = picking.numbers.bit_length() - 1
    while len(found) > 1:
        moved = code.value(f"shl {integers} {places}, {repeated_constant('i32', 31 - bit, picking.lanes)}")
        is_upper = code.value(f"icmp slt {integers} {moved}, zeroinitializer")
        found = [
            code.value(f"select <{picking.lanes} x i1> {is_upper}, {floats} {upper}, {floats} {lower}")
            for lower, upper in zip(found[::2], found[1::2])
        ]
        bit += 1
    return found[0]


def _of_part(code: Code, picks_by: str, part: Sequence[float], places: str) -> str:
    picking = _PICKING[picks_by]
    integers, floats = f"<{picking.lanes} x i32>", f"<{picking.lanes} x float>"
    if not picking.by_bytes:
        return code.value(f"call {floats} {picking.function}({floats} {_floats(part)}, {integers} {places})")

    constant = partial(repeated_constant, "i32", count=picking.lanes)
    # Four neighbouring bytes for each place.
    own = code.value(f"and {integers} {places}, {constant(picking.numbers - 1)}")
    own = code.value(f"mul {integers} {own}, {constant(0x04040404)}")
    own = code.value(f"add {integers} {own}, {constant(0x03020100)}")
    own = code.value(f"bitcast {integers} {own} to {_BYTES}")
    quarters = [_floats(part[at : at + picking.lanes]) for at in range(0, picking.numbers, picking.lanes)]
    quarters = [code.value(f"bitcast {floats} {each} to {_BYTES}") for each in quarters]
    operands = ", ".join(f"{_BYTES} {each}" for each in (*quarters, own))
    return code.value(f"bitcast {_BYTES} {code.value(f'call {_BYTES} {picking.function}({operands})')} to {floats}")


def _floats(numbers: Sequence[float]) -> str:
    return f"<{', '.join(f'float {float_constant(each)}' for each in numbers)}>"


def _joined(code: Code, size: int, one: str, other: str) -> str:
    kind, order = f"<{size} x float>", ", ".join(f"i32 {at}" for at in range(2 * size))
    return code.value(f"shufflevector {kind} {one}, {kind} {other}, <{2 * size} x i32> <{order}>")


def _shuffled(code: Code, element: str, lanes: int, vector: str, picked: list[int]) -> str:
    if picked == list(range(lanes)):
        return vector
    kind, order = f"<{lanes} x {element}>", ", ".join(f"i32 {lane}" for lane in picked)
    return code.value(f"shufflevector {kind} {vector}, {kind} poison, <{len(picked)} x i32> <{order}>")
