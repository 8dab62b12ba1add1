"""The innermost loop of dot products: a few rows times a few rows of weights, in the processor's vector registers."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.slot_bytes import widened
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors, masked_load, store_totals

_PARAMETERS = (
    "ptr %x, ptr %w, ptr %y, ptr %sums, i64 %length, i64 %pitch, i64 %stride, i64 %width, ptr %ahead, i64 %others, "
    "i64 %apart, i64 %along, i1 %begins, i1 %ends"
)


def dot_tile(vectors: Vectors, dtype: str, outputs: int, rows: int) -> str:
    """Return the assembly of ``dot_OUTPUTSxROWS``, whose parameters are `_PARAMETERS`.

    It computes dot products of rows of x and of w, which have length ``length``. Rows of x are ``pitch`` apart, those
    of w ``stride``, those of y ``width``. The order in which a product's numbers are added does not depend on the tile,
    so a row's results do not depend on other rows. For products of a part of a row, a tile that does not begin a row
    goes on from ``sums``, and one that does not end it leaves its sums there; only a row's last part may be no multiple
    of the step. With the vector from number i on, the tile prefetches, for each output e, the line of number ``i along
    + (e & others) apart`` from ``ahead`` on: 4, 2 or 1 lines in all. Without that, a processor waits for weights as
    long as it computes with them.

    w is of ``dtype``, x of its `Vectors.row_dtype`.
    """
    tile = _Tile(vectors, dtype, outputs, rows)
    return tile.text()


class _Tile:
    """A tile's code; sums are named by a prefix, which says how far they are, and their index."""

    def __init__(self, vectors: Vectors, dtype: str, outputs: int, rows: int) -> None:
        self._vectors, self._dtype, self._outputs, self._rows = vectors, dtype, outputs, rows
        self._kind, self._row_kind = LLVM_TYPES[dtype], LLVM_TYPES[vectors.row_dtype(dtype)]
        self._step = vectors.step(dtype)
        self._sums = outputs * rows
        self._code = Code(f"internal void @dot_{outputs}x{rows}({_PARAMETERS}) #0")

    def text(self) -> str:
        """Return the whole function."""
        code, wide, lanes, step = self._code, self._vectors.wide, self._vectors.lanes, self._step
        starts_x = [code.at(self._row_kind, "%x", code.arithmetic("mul", "%pitch", row)) for row in range(self._rows)]
        starts_w = [code.at(self._kind, "%w", code.arithmetic("mul", "%stride", each)) for each in range(self._outputs)]
        further = [code.arithmetic("and", "%others", each) for each in range(self._outputs)]
        starts_ahead = [code.at(self._kind, "%ahead", code.arithmetic("mul", "%apart", each)) for each in further]
        whole = code.arithmetic("and", "%length", -step)
        code.branch("%begins", "start", "go_on")
        code.start("go_on")
        for index in range(self._sums):
            code.value(f"load {wide}, ptr {code.at('float', '%sums', lanes * index)}, align 4", f"%left{index}")
        code.effect("br label %start")
        code.start("start")
        self._join("begun", ("zeroinitializer", "entry"), ("left", "go_on"))
        code.branch(code.value(f"icmp sgt i64 {whole}, 0"), "loop", "rest")
        code.start("loop")
        code.value("phi i64 [ 0, %start ], [ %further, %loop ]", "%i")
        self._join("old", ("begun", "start"), ("sum", "loop"))
        along = code.arithmetic("mul", "%i", "%along")
        for start in starts_ahead:
            line = code.at(self._kind, start, along)
            code.effect(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 2, i32 1)")
        self._add("old", "sum", starts_x, starts_w, "%i", None)
        code.value(f"add i64 %i, {step}", "%further")
        code.branch(code.value(f"icmp slt i64 %further, {whole}"), "loop", "rest")
        code.start("rest")
        self._join("most", ("begun", "start"), ("sum", "loop"))
        left = code.arithmetic("sub", "%length", whole)
        code.branch(code.value(f"icmp sgt i64 {left}, 0"), "tail", "done")
        code.start("tail")
        self._add("most", "last", starts_x, starts_w, whole, self._vectors.first(code, step, left))
        code.effect("br label %done")
        code.start("done")
        self._join("all", ("most", "rest"), ("last", "tail"))
        code.branch("%ends", "end", "leave")
        code.start("leave")
        for index in range(self._sums):
            code.effect(f"store {wide} %all{index}, ptr {code.at('float', '%sums', lanes * index)}, align 4")
        code.effect("ret void")
        code.start("end")
        self._write([f"%all{index}" for index in range(self._sums)])
        code.effect("ret void")
        return code.text()

    def _join(self, name: str, *sources: tuple[str, str]) -> None:
        """Begin a block with sums that come from several: prefixes, or a constant, and blocks."""
        for index in range(self._sums):
            values = [each if each == "zeroinitializer" else f"%{each}{index}" for each, _ in sources]
            places = ", ".join(f"[ {value}, %{block} ]" for value, (_, block) in zip(values, sources))
            self._code.value(f"phi {self._vectors.wide} {places}", f"%{name}{index}")

    def _add(
        self, before: str, after: str, starts_x: list[str], starts_w: list[str], index: str, mask: str | None
    ) -> None:
        """Append the products of a vector's numbers from an index on; without a mask, of all."""
        parts_x = [self._read(start, self._row_kind, index, mask) for start in starts_x]
        for output, start in enumerate(starts_w):
            part_w = self._read(start, self._kind, index, mask)
            for row, part_x in enumerate(parts_x):
                place = row * self._outputs + output
                self._multiply_add(part_w, part_x, f"%{before}{place}", f"%{after}{place}")

    def _multiply_add(self, one: str, other: str, to: str, name: str) -> None:
        wide = self._vectors.wide
        if self._vectors.pairs(self._dtype):
            operands = f"{wide} {to}, <32 x bfloat> {one}, <32 x bfloat> {other}"
            self._code.value(f"call {wide} @llvm.x86.avx512bf16.dpbf16ps.512({operands})", name)
        else:
            self._vectors.multiply_add(self._code, one, other, to, name)

    def _read(self, start: str, kind: str, index: str, mask: str | None) -> str:
        """Return a vector's numbers as they are multiplied."""
        code, step = self._code, self._step
        place = code.at(kind, start, index)
        if mask is None:
            numbers = code.load(f"<{step} x {kind}>", place, SIZES[kind])
        else:
            name, some = masked_load(step, SIZES[kind])
            operands = f"ptr {place}, i32 {SIZES[kind]}, <{step} x i1> {mask}, {some} zeroinitializer"
            bits = code.value(f"call {some} {name}({operands})")
            numbers = code.value(f"bitcast {some} {bits} to <{step} x {kind}>")
        if kind == "float" or self._vectors.pairs(self._dtype):
            return numbers
        if kind == "i8":
            return widened(code, self._dtype, step, numbers)
        return code.value(f"fpext <{step} x {kind}> {numbers} to {self._vectors.wide}")

    def _write(self, sums: list[str]) -> None:
        """Append stores of the totals of sums to y."""
        store_totals(self._code, self._vectors, sums, self._outputs)
