"""A processor's vectors, and what all code that uses them shares."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxinfer.ops.cpu_kernels.assembly import Code, float_constant

# The types of weights and cached rows, and of the rows that they multiply.
LLVM_TYPES = {"float32": "float", "bfloat16": "bfloat", "float16": "half", "int8": "i8", "uint8": "i8"}
SIZES = {"float": 4, "bfloat": 2, "half": 2, "i8": 1}
# How LLVM names the types of masked loads, by their bytes. More processors have instructions for i16 than for floats.
_MASKED = {4: ("f32", "float"), 2: ("i16", "i16"), 1: ("i8", "i8")}
# The outputs of a tile.
OUTPUTS = 4

_PAUSE_X86 = "void @llvm.x86.sse2.pause()"
_PAUSE_ARM = "void @llvm.aarch64.hint(i32 1)"


@dataclass(frozen=True)
class Vectors:
    """A processor's vectors: the float32 ``lanes`` of one, the ``rows`` of a tile that fits its registers, the dtypes.

    ``pairs_bfloat16`` says whether it can multiply bfloat16 pairs and add them to float32 sums. ``pause`` is the call
    that pauses a waiting thread. ``tiles_bfloat16`` says whether it has a matrix unit for bfloat16, ``dots_bytes``
    of how many bytes its widest vectors are that it multiplies, adding four products at a time (0: of none),
    ``pairs_bytes`` whether it adds two in 16 bits, ``expands_words`` whether a mask says where
    in a vector it puts numbers of two bytes. ``picks_by`` is what it picks float32 by out of a table (`lookups`), if it
    does.
    """

    lanes: int
    rows: int
    pairs_bfloat16: bool
    dtypes: tuple[str, ...]
    pause: str
    tiles_bfloat16: bool = False
    dots_bytes: int = 0
    pairs_bytes: bool = False
    expands_words: bool = False
    picks_by: str = ""

    def step(self, dtype: str) -> int:
        """Return how many numbers of a row one vector holds."""
        return 2 * self.lanes if self.pairs(dtype) else self.lanes

    def pairs(self, dtype: str) -> bool:
        """Whether products of this dtype use pairs."""
        return dtype == "bfloat16" and self.pairs_bfloat16

    def row_dtype(self, dtype: str) -> str:
        """Return the dtype of rows that weights of a dtype multiply."""
        return "bfloat16" if self.pairs(dtype) else "float32"

    def tiles(self, dtype: str, numbers: int) -> bool:
        """Whether products of this dtype, in rows of this length, use the matrix unit."""
        return dtype == "bfloat16" and self.tiles_bfloat16 and numbers % (2 * self.lanes) == 0

    @property
    def wide(self) -> str:
        """The type of a float32 vector."""
        return f"<{self.lanes} x float>"

    def spread(self, code: Code, number: str) -> str:
        """Append a vector with one float32 in every lane."""
        single = code.value(f"insertelement {self.wide} poison, float {number}, i32 0")
        return code.value(
            f"shufflevector {self.wide} {single}, {self.wide} poison, <{self.lanes} x i32> zeroinitializer"
        )

    def constant(self, number: float) -> str:
        """Return a vector with a constant in every lane."""
        return f"<{', '.join([f'float {float_constant(number)}'] * self.lanes)}>"

    def first(self, code: Code, lanes: int, count: str) -> str:
        """Append a mask of the first ``count`` of some lanes."""
        single = code.value(f"insertelement <{lanes} x i64> poison, i64 {count}, i32 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        counts = code.value(f"shufflevector <{lanes} x i64> {single}, <{lanes} x i64> poison, {zeros}")
        order = f"<{', '.join(f'i64 {lane}' for lane in range(lanes))}>"
        return code.value(f"icmp slt <{lanes} x i64> {order}, {counts}")

    def multiply_add(self, code: Code, one: str, other: str, to: str, name: str | None = None) -> str:
        """Append ``one * other + to``, rounded once if the processor can."""
        operands = f"{self.wide} {one}, {self.wide} {other}, {self.wide} {to}"
        return code.value(f"call {self.wide} @llvm.fmuladd.v{self.lanes}f32({operands})", name)


def describe_vectors(triple: str, features: Mapping[str, bool]) -> Vectors | None:
    """Return the vectors of a processor with these LLVM features; None for an unknown kind."""
    make = triple.partition("-")[0]
    if make in ("aarch64", "arm64"):
        return Vectors(4, 6, False, ("float32", "bfloat16", "float16"), _PAUSE_ARM, picks_by="neon")
    if make not in ("x86_64", "amd64"):
        return None
    dtypes = ("float32", "bfloat16", *(["float16"] if features.get("f16c") else []))
    if features.get("avx512f"):
        has_unit = features.get("amx-tile", False) and features.get("amx-bf16", False)
        dots_bytes = 64 if features.get("avx512vnni") else 0
        pairs, expands = features.get("avx512bf16", False), features.get("avx512vbmi2", False)
        return Vectors(16, 6, pairs, dtypes, _PAUSE_X86, has_unit, dots_bytes, True, expands, "avx512")
    lanes, rows = (8, 3) if features.get("avx") else (4, 2)
    has_integers = features.get("avx2", False)
    return Vectors(
        lanes,
        rows,
        False,
        dtypes,
        _PAUSE_X86,
        dots_bytes=32 if features.get("avxvnni") else 0,
        pairs_bytes=has_integers,
        picks_by="avx2" if has_integers else "",
    )


def in_bytes(dtype: str) -> bool:
    """Whether cached rows of this dtype are bytes with scales (`jaxinfer.ops.rows_in_bytes`)."""
    return LLVM_TYPES[dtype] == "i8"


def declarations(vectors: Vectors) -> str:
    """Return declarations of the LLVM functions that the code calls."""
    wide = vectors.wide
    lines = [f"declare {wide} @llvm.fmuladd.v{vectors.lanes}f32({wide}, {wide}, {wide})"]
    lines.append(f"declare {vectors.pause.replace('i32 1', 'i32 immarg')}")
    for size, lanes in itertools.product(_MASKED, (vectors.lanes, 2 * vectors.lanes)):
        name, some = masked_load(lanes, size)
        lines.append(f"declare {some} {name}(ptr, i32 immarg, <{lanes} x i1>, {some})")
    lines.append("declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
    if vectors.pairs_bfloat16:
        lines.append(f"declare {wide} @llvm.x86.avx512bf16.dpbf16ps.512({wide}, <32 x bfloat>, <32 x bfloat>)")
    return "\n".join([*lines, ""])


def masked_load(lanes: int, size: int) -> tuple[str, str]:
    """Return LLVM's function that loads some lanes of ``size`` bytes, and the type of its result."""
    name, kind = _MASKED[size]
    return f"@llvm.masked.load.v{lanes}{name}.p0", f"<{lanes} x {kind}>"


def add_up(code: Code, sums: list[str], lanes: int, element: str = "float") -> str:
    """Return a vector whose lane i is the sum of the lanes of vector i.

    Neighbours are added first, then neighbouring pairs, and so on, whatever the number of vectors.
    """
    wide, operation = f"<{lanes} x {element}>", "fadd" if element == "float" else "add"

    def shuffled(one: str, other: str, picked: list[int]) -> str:
        mask = ", ".join(f"i32 {lane}" for lane in picked)
        return code.value(f"shufflevector {wide} {one}, {wide} {other}, <{lanes} x i32> <{mask}>")

    distance = 1
    while distance < lanes:
        merged = []
        for one, other in zip(sums[::2], [*sums[1::2], sums[-1]]):
            # In a shuffle, lanes of ``other`` are numbered after those of ``one``; they go to lanes with this bit set.
            shifts = [lanes if lane & distance else 0 for lane in range(lanes)]
            lower = shuffled(one, other, [(lane & ~distance) + shift for lane, shift in enumerate(shifts)])
            upper = shuffled(one, other, [(lane | distance) + shift for lane, shift in enumerate(shifts)])
            merged.append(code.value(f"{operation} {wide} {lower}, {upper}"))
        sums = merged
        distance *= 2
    return sums[0]


def store_totals(
    code: Code,
    vectors: Vectors,
    sums: list[str],
    outputs: int,
    element: str = "float",
    change: Callable[[str, int], str] = lambda part, row: part,
) -> None:
    """Append stores of the totals of a tile's sums: row by row of ``outputs`` to y, rows ``width`` apart.

    ``change(part, row)`` appends what makes float32 of some outputs' totals of a row.
    """
    wide, lanes = f"<{vectors.lanes} x {element}>", vectors.lanes
    # Up to ``lanes`` sums at a time become one vector of their totals.
    for first in range(0, len(sums), lanes):
        several = sums[first : first + lanes]
        added = add_up(code, several, lanes, element)
        run = min(outputs, len(several))
        for begin in range(0, len(several), run):
            row, output = divmod(first + begin, outputs)
            picked = ", ".join(f"i32 {begin + lane}" for lane in range(run))
            part = change(code.value(f"shufflevector {wide} {added}, {wide} poison, <{run} x i32> <{picked}>"), row)
            place = code.at("float", "%y", code.arithmetic("add", code.arithmetic("mul", "%width", row), output))
            code.effect(f"store <{run} x float> {part}, ptr {place}, align 4")
