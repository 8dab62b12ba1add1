"""Codes of 4 and 8 bits as pairs of bfloat16, which a processor multiplies and adds up by one instruction.

Of a run of 32 codes, 16 vectors have two codes each of every output (`grouped_tiles`). Codes of 4 bits are looked up
where they lie in words, so a row's pairs are put into that order first; integers of 8 bits are pairs as they lie, and
their sums are two, of every other pair.
"""

from collections.abc import Iterable, Iterator

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import bits_of_level, multiply_add, tile_declarations
from jaxinfer.ops.cpu_kernels.sixteen_outputs import BYTES, FLOATS, INTEGERS, ROWS, spread_four
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_WORDS, _PAIRS = f"<{RUN} x i16>", f"<{RUN} x bfloat>"
_BYTE, _BYTES_OF_LINE = 8, 64
# From so many tiles on, it takes less time to widen bytes once.
_TILES_OF_MANY = 12
# Codes in a word.
_HALVES = 4


class Pairs:
    """Codes, and numbers of rows, as pairs of bfloat16 (`grouped_tiles.Numbers`)."""

    element, vector, rows, rows_of_widened = "bfloat", _PAIRS, ROWS, ROWS

    def __init__(self, vectors: Vectors, form: Format) -> None:
        self._vectors, self._form, self.sums_of_row = vectors, form, 2 if form.bits == _BYTE else 1
        # A look-up takes less time than to read what was written.
        self.many = _TILES_OF_MANY * ROWS if form.bits == _BYTE else None

    def functions(self) -> list[str]:
        """Return declarations, and ``arrange(x, to, runs)``."""
        return [tile_declarations(self._vectors), _arrange_function(self._form)]

    def widened(self, code: Code, lines: list[str]) -> Iterator[str]:
        """Write and return the numbers of a run's codes, one vector after the other."""
        yield from _levels(code, self._form, lines) if self._form.bits == 4 else _pairs_of_bytes(code, lines)

    def added(self, code: Code, run: Iterable[str], places: list[str], to: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's numbers with those at its place are added."""
        found, apart = list(to), self.sums_of_row
        for at, numbers in enumerate(run):
            for row, place in enumerate(places):
                pair = spread_four(code, code.at("bfloat", place, 2 * at))
                pair = code.value(f"bitcast {INTEGERS} {pair} to {_PAIRS}")
                own = apart * row + at % apart
                found[own] = multiply_add(self._vectors, code, numbers, pair, found[own])
        return found


def _arrange_function(form: Format) -> str:
    """Return ``arrange(x, to, runs)``, which writes runs of x in the order in which tiles multiply pairs."""
    code = Code("internal void @arrange(ptr %x, ptr %to, i64 %runs) #0")
    order = ", ".join(f"i32 {place}" for place in (_order() if form.bits == 4 else range(RUN)))
    with code.repeated("each_run", 0, "%runs") as each:
        at = code.arithmetic("mul", each.index, RUN)
        numbers = code.load(_PAIRS, code.at("bfloat", "%x", at), 2)
        if form.bits == _BYTE:
            wide = f"<{RUN} x float>"
            scaled = code.value(f"fpext {_PAIRS} {numbers} to {wide}")
            scaled = code.value(f"fmul {wide} {scaled}, <{', '.join([f'float {2.0**-24}'] * RUN)}>")
            numbers = code.value(f"fptrunc {wide} {scaled} to {_PAIRS}")
        pairs = code.value(f"shufflevector {_PAIRS} {numbers}, {_PAIRS} poison, <{RUN} x i32> <{order}>")
        code.effect(f"store {_PAIRS} {pairs}, ptr {code.at('bfloat', '%to', at)}, align 2")
    code.effect("ret void")
    return code.text()


def _levels(code: Code, form: Format, lines: list[str]) -> list[str]:
    """Return the levels of a run's codes, which are in lines: each vector has two of every output."""
    table = ", ".join(f"i16 {bits_of_level(level)}" for level in form.levels * (RUN // len(form.levels)))
    found = []
    for packed in lines:
        words = code.value(f"bitcast {BYTES} {packed} to {_WORDS}")
        for half in range(_HALVES):
            shift = ", ".join([f"i16 {4 * half}"] * RUN)
            # A look-up reads five bits, of which the table leaves the uppermost out.
            codes = code.value(f"lshr {_WORDS} {words}, <{shift}>")
            operands = f"{_WORDS} <{table}>, {_WORDS} {codes}"
            levels = code.value(f"call {_WORDS} @llvm.x86.avx512.permvar.hi.512({operands})")
            found.append(code.value(f"bitcast {_WORDS} {levels} to {_PAIRS}"))
    return found


def _pairs_of_bytes(code: Code, lines: list[str]) -> list[str]:
    """Return a run's integers, four of every output in each line: each vector has two of every output."""
    found, words = [], range(0, _BYTES_OF_LINE, 4)
    # A byte becomes the first of its four, below which there is nothing: an integer 2^24 times the code.
    moved = [[place for word in words for place in (-1, -1, -1, word % 16 + byte)] for byte in range(3)]
    uppermost = ", ".join(f"i8 {-1 if at % 4 == 3 else 0}" for at in range(_BYTES_OF_LINE))
    halves = [place for word in words for place in (word % 16 + 2, word % 16 + 3, -1, -1)]
    is_lower = ", ".join(f"i1 {at % 4 < 2}".lower() for at in range(_BYTES_OF_LINE))
    for packed in lines:
        # Floats of codes have nothing in their lower halves: the upper ones are the numbers in bfloat16.
        floats = []
        last = code.value(f"and {BYTES} {packed}, <{uppermost}>")
        for alone in (*(_shuffled(code, packed, order) for order in moved), last):
            number = code.value(f"bitcast {BYTES} {alone} to {INTEGERS}")
            number = code.value(f"sitofp {INTEGERS} {number} to {FLOATS}")
            floats.append(code.value(f"bitcast {FLOATS} {number} to {BYTES}"))
        for first, second in (floats[:2], floats[2:]):
            lower = _shuffled(code, first, halves)
            both = code.value(f"select <{_BYTES_OF_LINE} x i1> <{is_lower}>, {BYTES} {lower}, {BYTES} {second}")
            found.append(code.value(f"bitcast {BYTES} {both} to {_PAIRS}"))
    return found


def _shuffled(code: Code, line: str, places: list[int]) -> str:
    """Return the bytes of a line in another order in each quarter of it; -1 is a zero."""
    order = ", ".join(f"i8 {place}" for place in places)
    return code.value(f"call {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES} {line}, {BYTES} <{order}>)")


def _order() -> list[int]:
    """Return the places of a run's codes in the order of `_levels`, of one output.

    A word is two bytes, which have the codes i and i + 16, i + 1 and i + 17 from the lowest bits up.
    """
    return [
        4 * four + 2 * word + (0, 16, 1, 17)[half] for four in range(4) for half in range(_HALVES) for word in range(2)
    ]
