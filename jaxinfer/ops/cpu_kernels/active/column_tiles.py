"""The innermost loop of products by columns: some rows times the listed lines of some columns of weights."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors, masked_load

_PARAMETERS = "ptr %x, ptr %w, ptr %list, i64 %count, ptr %sums, i64 %pitch, i64 %stride, i64 %columns, i1 %packed"
# How many entries of a list ahead weights are fetched: their places follow no pattern that a processor finds.
_AHEAD = 8


def column_tile(vectors: Vectors, dtype: str, rows: int, size: int) -> str:
    """Return ``active_ROWSxSIZE(x, w, list, count, sums, pitch, stride, columns, packed)``.

    For each row it adds up, over the ``count`` units of a list, one after the other, a unit of x times ``size``
    vectors of columns of w: of unit i of float32, line i of w; of pair i of bfloat16, lines 2 i and 2 i + 1, which are
    multiplied and added as `dot_tiles` does. Lines of w are ``stride`` apart, rows of x ``pitch`` units. Sums begin
    with zero and are written to ``sums``, row by row of ``size`` vectors. If ``size`` is 1, only ``columns`` are read.
    With ``packed``, w has the lines of the listed units alone, one after the other (`pack_function`).
    """
    return _Tile(vectors, dtype, rows, size).text()


class _Tile:
    def __init__(self, vectors: Vectors, dtype: str, rows: int, size: int) -> None:
        self._vectors, self._rows, self._size = vectors, rows, size
        self._kind, self._pairs = LLVM_TYPES[dtype], vectors.pairs(dtype)
        self._code = Code(f"internal void @active_{rows}x{size}({_PARAMETERS}) #0")

    def text(self) -> str:
        """Return the whole function."""
        code, wide, lanes, sums = self._code, self._vectors.wide, self._vectors.lanes, self._rows * self._size
        mask = self._vectors.first(code, lanes, "%columns") if self._size == 1 else None
        starts = [code.at("i32", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(self._rows)]
        last = code.arithmetic("sub", "%count", 1)
        code.branch(code.value("icmp sgt i64 %count, 0"), "loop", "done")
        code.start("loop")
        code.value("phi i64 [ 0, %entry ], [ %further, %loop ]", "%i")
        for index in range(sums):
            code.value(f"phi {wide} [ zeroinitializer, %entry ], [ %sum{index}, %loop ]", f"%old{index}")
        later = code.smaller(code.arithmetic("add", "%i", _AHEAD), last)
        for line in self._lines(code.value(f"select i1 %packed, i64 {later}, i64 {self._unit(later)}")):
            for byte in range(0, self._size * lanes * SIZES[self._kind], 64):
                place = code.at("i8", line, byte)
                code.effect(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")
        unit = self._unit("%i")
        lines = self._lines(code.value(f"select i1 %packed, i64 %i, i64 {unit}"))
        parts = [self._read(lines, each, mask) for each in range(self._size)]
        for row, start in enumerate(starts):
            number = self._vectors.spread(code, code.load_at("float", start, unit))
            for each, part in enumerate(parts):
                index = row * self._size + each
                self._multiply_add(part, number, f"%old{index}", f"%sum{index}")
        code.value("add i64 %i, 1", "%further")
        code.branch(code.value("icmp slt i64 %further, %count"), "loop", "done")
        code.start("done")
        for index in range(sums):
            code.value(f"phi {wide} [ zeroinitializer, %entry ], [ %sum{index}, %loop ]", f"%all{index}")
        for index in range(sums):
            code.effect(f"store {wide} %all{index}, ptr {code.at('float', '%sums', lanes * index)}, align 64")
        code.effect("ret void")
        return code.text()

    def _unit(self, index: str) -> str:
        return self._code.value(f"zext i32 {self._code.load_at('i32', '%list', index)} to i64")

    def _lines(self, unit: str) -> list[str]:
        """Return the addresses of the lines of a unit."""
        code = self._code
        line = code.arithmetic("mul", code.arithmetic("mul", unit, 2) if self._pairs else unit, "%stride")
        first = code.at(self._kind, "%w", line)
        return [first, code.at(self._kind, first, "%stride")] if self._pairs else [first]

    def _read(self, lines: list[str], each: int, mask: str | None) -> str:
        """Return a vector of columns as they are multiplied."""
        code, lanes, kind = self._code, self._vectors.lanes, self._kind
        some, found = f"<{lanes} x {kind}>", []
        for line in lines:
            place = code.at(kind, line, lanes * each)
            if mask is None:
                found.append(code.load(some, place, SIZES[kind]))
                continue
            name, bits = masked_load(lanes, SIZES[kind])
            operands = f"ptr {place}, i32 {SIZES[kind]}, <{lanes} x i1> {mask}, {bits} zeroinitializer"
            found.append(code.value(f"bitcast {bits} {code.value(f'call {bits} {name}({operands})')} to {some}"))
        if self._pairs:
            order = ", ".join(f"i32 {lane}, i32 {lanes + lane}" for lane in range(lanes))
            return code.value(f"shufflevector {some} {found[0]}, {some} {found[1]}, <{2 * lanes} x i32> <{order}>")
        return found[0] if kind == "float" else code.value(f"fpext {some} {found[0]} to {self._vectors.wide}")

    def _multiply_add(self, part: str, number: str, to: str, name: str) -> None:
        wide, code = self._vectors.wide, self._code
        if not self._pairs:
            self._vectors.multiply_add(code, part, number, to, name)
            return
        pair = code.value(f"bitcast {wide} {number} to <32 x bfloat>")
        operands = f"{wide} {to}, <32 x bfloat> {part}, <32 x bfloat> {pair}"
        code.value(f"call {wide} @llvm.x86.avx512bf16.dpbf16ps.512({operands})", name)


def pack_function(vectors: Vectors, dtype: str, size: int) -> str:
    """Return ``pack_SIZE(w, list, count, packed, stride)``, which copies ``size`` vectors of the listed units' lines.

    The lines of units of one class often lie so that they share few places of a cache: tiles of rows would fetch them
    again and again.
    """
    kind, lines = LLVM_TYPES[dtype], 2 if vectors.pairs(dtype) else 1
    code = Code(f"internal void @pack_{size}(ptr %w, ptr %list, i64 %count, ptr %packed, i64 %stride) #0")
    some, width = f"<{vectors.lanes} x {kind}>", vectors.lanes * size
    last = code.arithmetic("sub", "%count", 1)
    with code.repeated("each", 0, "%count") as each:
        later = code.smaller(code.arithmetic("add", each.index, _AHEAD), last)
        ahead, unit = (
            code.value(f"zext i32 {code.load_at('i32', '%list', index)} to i64") for index in (later, each.index)
        )
        for line in range(lines):
            from_w, from_ahead = (
                code.at(
                    kind,
                    "%w",
                    code.arithmetic("mul", code.arithmetic("add", code.arithmetic("mul", of, lines), line), "%stride"),
                )
                for of in (unit, ahead)
            )
            for byte in range(0, width * SIZES[kind], 64):
                code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', from_ahead, byte)}, i32 0, i32 3, i32 1)")
            place = code.arithmetic(
                "mul", code.arithmetic("add", code.arithmetic("mul", each.index, lines), line), width
            )
            to = code.at(kind, "%packed", place)
            for part in range(0, width, vectors.lanes):
                value = code.load(some, code.at(kind, from_w, part), SIZES[kind])
                code.effect(f"store {some} {value}, ptr {code.at(kind, to, part)}, align {SIZES[kind]}")
    code.effect("ret void")
    return code.text()
