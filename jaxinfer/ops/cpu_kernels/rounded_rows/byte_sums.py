"""Bytes times bytes, added in int32: by one instruction, by several, or by none that is made for it.

An instruction for bytes multiplies unsigned ones by signed ones. With VNNI (AVX-512's, or AVX-VNNI on vectors of half
the size) it adds four products to an integer; codes of 8 bits become unsigned by 128, which is taken off again as 128
times the sum of the row: integers are exact. With AVX2 it adds two products in 16 bits, into which codes of 8 bits fit
as sizes, with the signs given to the row; of codes of 4 bits eight such sums fit, before they are added to integers.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import Format

# The numbers of a row that a vector holds, and its lanes.
VECTOR, LANES = 64, 16
BYTES, INTEGERS, FLOATS = f"<{VECTOR} x i8>", f"<{LANES} x i32>", f"<{LANES} x float>"
_SHORT, _BYTE = f"<{VECTOR // 2} x i16>", 8
_FOURS = "@llvm.x86.avx512.vpdpbusd"
_PAIRS, _ADD_PAIRS, _SIGNED = "@llvm.x86.avx2.pmadd.ub.sw", "@llvm.x86.avx2.pmadd.wd", "@llvm.x86.avx2.psign.b"
_SIZES = f"@llvm.abs.v{VECTOR}i8"
# The largest code of 4 bits times the largest byte, twice: so many of them fit 16 bits.
_MOST_SHORT = 32767 // (2 * 15 * 127)


def declarations(vectors: Vectors) -> str:
    """Return declarations of what sums call, beyond `tiles.declarations`."""
    if vectors.dots_bytes:
        lanes = vectors.dots_bytes // 4
        return f"declare <{lanes} x i32> {_FOURS}.{8 * vectors.dots_bytes}({', '.join([f'<{lanes} x i32>'] * 3)})\n"
    if not vectors.pairs_bytes:
        return ""
    return (
        f"declare <16 x i16> {_PAIRS}(<32 x i8>, <32 x i8>)\ndeclare <8 x i32> {_ADD_PAIRS}(<16 x i16>, <16 x i16>)\n"
        f"declare <32 x i8> {_SIGNED}(<32 x i8>, <32 x i8>)\ndeclare {BYTES} {_SIZES}({BYTES}, i1 immarg)\n"
    )


def name_of_products(vectors: Vectors) -> str:
    """Return letters that stand for how a processor multiplies bytes."""
    return f"_dots_{vectors.dots_bytes}" if vectors.dots_bytes else "_by_pairs" if vectors.pairs_bytes else ""


def added_to_codes(vectors: Vectors, form: Format) -> int:
    """Return how much larger codes are than their levels where they are multiplied."""
    if form.bits == _BYTE:
        return 0 if _multiplies_sizes(vectors) else 128
    return form.offset or 0


def whole_bytes(code: Code, vectors: Vectors, codes: str) -> str:
    """Return codes of 8 bits as they are multiplied."""
    if _multiplies_sizes(vectors):
        return codes
    return code.value(f"xor {BYTES} {codes}, <{', '.join(['i8 -128'] * VECTOR)}>")


class ByteSums:
    """Appends sums of products; ``before`` are those of each row at first, and codes have some ``bits``."""

    def __init__(self, code: Code, vectors: Vectors, bits: int, before: list[str]) -> None:
        self._code, self._vectors, self._bits, self._sums = code, vectors, bits, list(before)
        self._short: list[list[str]] = [[] for _ in before]

    def add(self, row: int, codes: str, numbers: str) -> None:
        """Append products of codes and a row's bytes, four of which are added to each integer of the row's sum."""
        code, vectors = self._code, self._vectors
        if vectors.dots_bytes:
            # All versions of LLVM take fours of bytes as integers.
            fours = [code.value(f"bitcast {BYTES} {each} to {INTEGERS}") for each in (codes, numbers)]
            operands = [(INTEGERS, each) for each in (self._sums[row], *fours)]
            if vectors.dots_bytes == VECTOR:
                given = ", ".join(f"{kind} {value}" for kind, value in operands)
                self._sums[row] = code.value(f"call {INTEGERS} {_FOURS}.512({given})")
            else:
                self._sums[row] = _halves(code, f"{_FOURS}.256", INTEGERS, *operands)
        elif vectors.pairs_bytes:
            self._add_pairs(row, codes, numbers)
        else:
            self._sums[row] = _added_widened(code, codes, numbers, self._sums[row])

    def totals(self) -> list[str]:
        """Return the sums of the rows."""
        for row, several in enumerate(self._short):
            if several:
                self._empty(row)
        return self._sums

    def _add_pairs(self, row: int, codes: str, numbers: str) -> None:
        code, several = self._code, self._short[row]
        if self._bits == _BYTE:
            numbers = _halves(code, _SIGNED, BYTES, (BYTES, numbers), (BYTES, codes))
            codes = code.value(f"call {BYTES} {_SIZES}({BYTES} {codes}, i1 false)")
        products = _halves(code, _PAIRS, _SHORT, (BYTES, codes), (BYTES, numbers))
        if several:
            products = code.value(f"add {_SHORT} {several[-1]}, {products}")
        several.append(products)
        if self._bits == _BYTE or len(several) == _MOST_SHORT:
            self._empty(row)

    def _empty(self, row: int) -> None:
        """Append what adds a row's sums in 16 bits to its integers."""
        code, ones = self._code, f"<{', '.join(['i16 1'] * (VECTOR // 2))}>"
        added = _halves(code, _ADD_PAIRS, INTEGERS, (_SHORT, self._short[row][-1]), (_SHORT, ones))
        self._sums[row] = code.value(f"add {INTEGERS} {self._sums[row]}, {added}")
        self._short[row] = []


def _multiplies_sizes(vectors: Vectors) -> bool:
    return vectors.pairs_bytes and not vectors.dots_bytes


def _halves(code: Code, function: str, found: str, *operands: tuple[str, str]) -> str:
    """Return what a function of vectors of half the size makes of each half of operands, given with their types."""
    results, (result, all_found) = [], _half(found)
    for which in range(2):
        parts = []
        for kind, value in operands:
            half, count = _half(kind)
            order = ", ".join(f"i32 {which * count // 2 + at}" for at in range(count // 2))
            part = code.value(f"shufflevector {kind} {value}, {kind} poison, <{count // 2} x i32> <{order}>")
            parts.append(f"{half} {part}")
        results.append(code.value(f"call {result} {function}({', '.join(parts)})"))
    order = ", ".join(f"i32 {at}" for at in range(all_found))
    return code.value(f"shufflevector {result} {results[0]}, {result} {results[1]}, <{all_found} x i32> <{order}>")


def _half(kind: str) -> tuple[str, int]:
    """Return the type of half a vector, and the count of a whole one."""
    count, element = kind.strip("<>").split(" x ")
    return f"<{int(count) // 2} x {element}>", int(count)


def _added_widened(code: Code, unsigned: str, signed: str, to: str) -> str:
    # A product fits into 16 bits, two of them do not. Numbers are told apart by shifts: lower ones come first.
    short, pairs, fours = f"<{VECTOR} x i16>", f"<{VECTOR // 2} x i32>", f"<{LANES} x i64>"
    one, other = (
        code.value(f"{way} {BYTES} {each} to {short}") for way, each in (("zext", unsigned), ("sext", signed))
    )
    products = code.value(f"bitcast {short} {code.value(f'mul {short} {one}, {other}')} to {pairs}")
    sixteen = f"<{', '.join(['i32 16'] * (VECTOR // 2))}>"
    lower = code.value(f"ashr {pairs} {code.value(f'shl {pairs} {products}, {sixteen}')}, {sixteen}")
    upper = code.value(f"ashr {pairs} {products}, {sixteen}")
    both = code.value(f"bitcast {pairs} {code.value(f'add {pairs} {lower}, {upper}')} to {fours}")
    first = code.value(f"trunc {fours} {both} to {INTEGERS}")
    moved = code.value(f"lshr {fours} {both}, <{', '.join(['i64 32'] * LANES)}>")
    last = code.value(f"trunc {fours} {moved} to {INTEGERS}")
    return code.value(f"add {INTEGERS} {to}, {code.value(f'add {INTEGERS} {first}, {last}')}")
