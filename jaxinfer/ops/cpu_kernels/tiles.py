"""The innermost loops: a few rows times a few rows or columns of weights, in the processor's vector registers."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.ops.cpu_kernels.assembly import Code

# The types of weights, and of the rows that they multiply.
LLVM_TYPES = {"float32": "float", "bfloat16": "bfloat", "float16": "half", "int8": "i8"}
ROW_TYPES = LLVM_TYPES | {"int8": "bfloat"}
_SIZES = {"float": 4, "bfloat": 2, "half": 2, "i8": 1}
# The output rows of a tile, or its vectors of output columns.
OUTPUTS = 4
COLUMN_VECTORS = 2

# Adding an integer from -64 to 63 to the bits of the bfloat16 192 gives the bfloat16 192 plus that integer.
LEAST_INTEGER, MOST_INTEGER = -64, 63
_OFFSET = 0x4340

_PARAMETERS = "ptr %x, ptr %w, ptr %y, i64 %length, i64 %pitch, i64 %stride, i64 %width, ptr %ahead"
_PAUSE_X86 = "void @llvm.x86.sse2.pause()"
_PAUSE_ARM = "void @llvm.aarch64.hint(i32 1)"


@dataclass(frozen=True)
class Vectors:
    """A processor's vectors: the float32 ``lanes`` of one, the ``rows`` of a tile that fits its registers, the dtypes.

    ``pairs_bfloat16`` says whether it can multiply bfloat16 pairs and add them to float32 sums. ``pause`` is the call
    that pauses a waiting thread. ``tiles_bfloat16`` says whether it has a matrix unit for bfloat16.
    """

    lanes: int
    rows: int
    pairs_bfloat16: bool
    dtypes: tuple[str, ...]
    pause: str
    tiles_bfloat16: bool = False

    def step(self, dtype: str) -> int:
        """Return how many numbers of a row one vector holds; a row is a whole multiple of it."""
        return 2 * self.lanes if self.pairs(dtype) else self.lanes

    def pairs(self, dtype: str) -> bool:
        """Whether products of this dtype use pairs."""
        return dtype in ("bfloat16", "int8") and self.pairs_bfloat16

    def tiles(self, dtype: str) -> bool:
        """Whether products of this dtype use the matrix unit."""
        return dtype == "bfloat16" and self.tiles_bfloat16

    def for_rows_of(self, numbers: int) -> "Vectors":
        """Return the vectors without what needs rows that are a multiple of their step, if this length is none."""
        if numbers % (2 * self.lanes) == 0:
            return self
        return replace(self, pairs_bfloat16=False, tiles_bfloat16=False)

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
        """Return a vector with a constant in every lane, in LLVM's notation: the bits of a float64."""
        (bits,) = struct.unpack("<Q", struct.pack("<d", np.float32(number)))
        return f"<{', '.join([f'float 0x{bits:016X}'] * self.lanes)}>"

    def multiply_add(self, code: Code, one: str, other: str, to: str, name: str | None = None) -> str:
        """Append ``one * other + to``, rounded once if the processor can."""
        operands = f"{self.wide} {one}, {self.wide} {other}, {self.wide} {to}"
        return code.value(f"call {self.wide} @llvm.fmuladd.v{self.lanes}f32({operands})", name)


def describe_vectors(triple: str, features: Mapping[str, bool]) -> Vectors | None:
    """Return the vectors of a processor with these LLVM features; None for an unknown kind."""
    make = triple.partition("-")[0]
    if make in ("aarch64", "arm64"):
        return Vectors(4, 4, False, ("float32", "bfloat16", "float16", "int8"), _PAUSE_ARM)
    if make not in ("x86_64", "amd64"):
        return None
    dtypes = ("float32", "bfloat16", "int8", *(["float16"] if features.get("f16c") else []))
    if features.get("avx512f"):
        has_unit = features.get("amx-tile", False) and features.get("amx-bf16", False)
        return Vectors(16, 4, features.get("avx512bf16", False), dtypes, _PAUSE_X86, has_unit)
    return Vectors(8 if features.get("avx") else 4, 2, False, dtypes, _PAUSE_X86)


def declarations(vectors: Vectors) -> str:
    """Return declarations of the LLVM functions that the code calls."""
    wide = vectors.wide
    lines = [f"declare {wide} @llvm.fmuladd.v{vectors.lanes}f32({wide}, {wide}, {wide})"]
    lines.append(f"declare {vectors.pause.replace('i32 1', 'i32 immarg')}")
    lines.append("declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)")
    if vectors.pairs_bfloat16:
        lines.append(f"declare {wide} @llvm.x86.avx512bf16.dpbf16ps.512({wide}, <32 x bfloat>, <32 x bfloat>)")
    return "\n".join([*lines, ""])


def dot_tile(vectors: Vectors, dtype: str, outputs: int, rows: int) -> str:
    """Return ``dot_OUTPUTSxROWS(x, w, y, length, pitch, stride, width, ahead)``: dot products of rows of x and of w.

    Rows have length ``length``; rows of x are ``pitch`` apart, those of w ``stride``, those of y ``width``. The order
    in which a product's numbers are added does not depend on the tile, so a row's results do not depend on other rows.
    The tile also prefetches as many numbers of w from ``ahead`` on. Without that, a processor waits for weights as long
    as it computes with them.

    Weights of int8 are from `LEAST_INTEGER` to `MOST_INTEGER`, with rows of bfloat16. Products of bfloat16 pairs use
    weights plus 192, and subtract products with 192 at the end.
    """
    kind, row_kind = LLVM_TYPES[dtype], ROW_TYPES[dtype]
    lanes, step, wide = vectors.lanes, vectors.step(dtype), vectors.wide
    is_offset = kind == "i8" and vectors.pairs(dtype)
    code = Code(f"internal void @dot_{outputs}x{rows}({_PARAMETERS}) #0")
    starts_x = [code.at(row_kind, "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_w = [code.at(kind, "%w", code.arithmetic("mul", "%stride", output)) for output in range(outputs)]
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %further, %loop ]", "%i")
    names = [f"{index}" for index in range(outputs * rows)]
    if is_offset:
        names += [f"_offset{row}" for row in range(rows)]
    for name in names:
        code.value(f"phi {wide} [ zeroinitializer, %entry ], [ %sum{name}, %loop ]", f"%old{name}")

    offset = f"<{', '.join([f'i16 {_OFFSET}'] * step)}>"

    def add_pairs(one: str, other: str, to: str, name: str) -> None:
        operands = f"{wide} {to}, <32 x bfloat> {one}, <32 x bfloat> {other}"
        code.value(f"call {wide} @llvm.x86.avx512bf16.dpbf16ps.512({operands})", name)

    def read(start: str, kind: str) -> str:
        numbers = code.load(f"<{step} x {kind}>", code.at(kind, start, "%i"), _SIZES[kind])
        if kind == "i8" and is_offset:
            widened = code.value(f"sext <{step} x i8> {numbers} to <{step} x i16>")
            greater = code.value(f"add <{step} x i16> {widened}, {offset}")
            return code.value(f"bitcast <{step} x i16> {greater} to <{step} x bfloat>")
        if kind == "float" or vectors.pairs(dtype):
            return numbers
        return code.value(f"{'sitofp' if kind == 'i8' else 'fpext'} <{step} x {kind}> {numbers} to {wide}")

    for output in range(outputs):
        line = code.at(kind, code.at(kind, "%ahead", code.arithmetic("mul", "%stride", output)), "%i")
        code.effect(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
    parts_x = [read(start, row_kind) for start in starts_x]
    for output, start in enumerate(starts_w):
        part_w = read(start, kind)
        for row, part_x in enumerate(parts_x):
            index = row * outputs + output
            if vectors.pairs(dtype):
                add_pairs(part_w, part_x, f"%old{index}", f"%sum{index}")
            else:
                vectors.multiply_add(code, part_w, part_x, f"%old{index}", f"%sum{index}")
    if is_offset:
        offsets = code.value(f"bitcast <{step} x i16> {offset} to <{step} x bfloat>")
        for row, part_x in enumerate(parts_x):
            add_pairs(offsets, part_x, f"%old_offset{row}", f"%sum_offset{row}")
    code.value(f"add i64 %i, {step}", "%further")
    code.branch(code.value("icmp slt i64 %further, %length"), "loop", "done")
    code.start("done")
    sums = [f"%sum{index}" for index in range(outputs * rows)]
    if is_offset:
        sums = [code.value(f"fsub {wide} {total}, %sum_offset{index // outputs}") for index, total in enumerate(sums)]
    # Up to ``lanes`` sums at a time become one vector of their totals.
    for first in range(0, outputs * rows, lanes):
        count = min(lanes, outputs * rows - first)
        totals = _add_up(code, sums[first : first + count], lanes)
        run = min(outputs, count)
        for begin in range(0, count, run):
            row, output = divmod(first + begin, outputs)
            picked = ", ".join(f"i32 {begin + lane}" for lane in range(run))
            mask = f"<{run} x i32> <{picked}>"
            part = code.value(f"shufflevector {wide} {totals}, {wide} poison, {mask}")
            place = code.at("float", "%y", code.arithmetic("add", code.arithmetic("mul", "%width", row), output))
            code.effect(f"store <{run} x float> {part}, ptr {place}, align 4")
    code.effect("ret void")
    return code.text()


def column_tile(vectors: Vectors, column_vectors: int, rows: int) -> str:
    """Return ``column_VECTORSxROWS(x, w, y, length, pitch, stride, width, ahead)``: rows of x times columns of w.

    All are float32. Row i of w is multiplied with number i of each row of x. Strides are as in `dot_tile`; there is no
    prefetch.
    """
    lanes, wide = vectors.lanes, vectors.wide
    code = Code(f"internal void @column_{column_vectors}x{rows}({_PARAMETERS}) #0")
    starts_x = [code.at("float", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %further, %loop ]", "%i")
    for index in range(rows * column_vectors):
        code.value(f"phi {wide} [ zeroinitializer, %entry ], [ %sum{index}, %loop ]", f"%old{index}")
    line = code.at("float", "%w", code.arithmetic("mul", "%i", "%stride"))
    parts = [code.load(wide, code.at("float", line, lanes * each), 4) for each in range(column_vectors)]
    for row, start in enumerate(starts_x):
        factors = vectors.spread(code, code.load_at("float", start, "%i"))
        for each, part in enumerate(parts):
            index = row * column_vectors + each
            vectors.multiply_add(code, part, factors, f"%old{index}", f"%sum{index}")
    code.value("add i64 %i, 1", "%further")
    code.branch(code.value("icmp slt i64 %further, %length"), "loop", "done")
    code.start("done")
    for row in range(rows):
        line = code.at("float", "%y", code.arithmetic("mul", "%width", row))
        for each in range(column_vectors):
            sums = f"%sum{row * column_vectors + each}"
            code.effect(f"store {wide} {sums}, ptr {code.at('float', line, lanes * each)}, align 4")
    code.effect("ret void")
    return code.text()


def _add_up(code: Code, sums: list[str], lanes: int) -> str:
    """Return a vector whose lane i is the sum of the lanes of vector i.

    Neighbours are added first, then neighbouring pairs, and so on, whatever the number of vectors.
    """
    wide = f"<{lanes} x float>"

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
            merged.append(code.value(f"fadd {wide} {lower}, {upper}"))
        sums = merged
        distance *= 2
    return sums[0]
