"""The assembly of sums of rows by weights, which go on from one stretch of rows to the next."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.slot_bytes import widened
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors, in_bytes, masked_load

# The most vectors of columns that a tile adds up.
WIDEST = 4

_PARAMETERS = "ptr %x, ptr %w, ptr %y, ptr %totals, i64 %length, i64 %pitch, i64 %stride, i64 %width, i64 %last"


def weighted_sum_functions(vectors: Vectors, dtype: str = "float32") -> list[str]:
    """Return ``add_weighted(x, w, y, totals, rows, length, pitch, stride, width, columns)`` and its tiles.

    To each of the ``columns`` of row r of y it adds, one after the other, that column of the ``length`` rows of w times
    the numbers of row r of x; and to each lane of row r of ``totals`` these numbers. Rows of x are ``pitch`` apart,
    those of w ``stride``, those of y ``width``, those of ``totals`` a vector. All are float32, but w of ``dtype``.
    Columns are at most as many as `WIDEST` vectors have.

    If ``dtype`` is of bytes, w has these, and so many more behind them that any vector ends in its row. Then both
    functions have one more argument, ``scales``: each row's of w.
    """
    # Some processors have no instruction for some numbers of two bytes: a loop that reads whole vectors has none.
    kinds = (True, False) if dtype == "float16" else (False,)
    sizes = [
        (size, rows, whole)
        for whole in kinds
        for size in range(1, WIDEST + 1)
        for rows in range(1, tile_rows(vectors) + 1)
    ]
    return [_masked_lanes(vectors), *(_tile(vectors, dtype, *size) for size in sizes), _cover(vectors, dtype, sizes)]


def _name(size: int, rows: int, whole: bool) -> str:
    return f"{'whole' if whole else 'some'}_{size}x{rows}"


def tile_rows(vectors: Vectors) -> int:
    """Return the most rows of a tile, whose sums and totals fit the processor's registers."""
    return 4 if vectors.rows >= 4 else 2


def _masked_lanes(vectors: Vectors) -> str:
    """Return declarations of what reads and writes some of a vector's lanes."""
    lanes, wide = vectors.lanes, vectors.wide
    return (
        f"declare {wide} @llvm.masked.load.v{lanes}f32.p0(ptr, i32 immarg, <{lanes} x i1>, {wide})\n"
        f"declare void @llvm.masked.store.v{lanes}f32.p0({wide}, ptr, i32 immarg, <{lanes} x i1>)\n"
    )


def first_lanes(code: Code, vectors: Vectors, count: str) -> str:
    """Append a mask of the first lanes of a vector."""
    lanes = vectors.lanes
    order = f"<{', '.join(f'i64 {lane}' for lane in range(lanes))}>"
    single = code.value(f"insertelement <{lanes} x i64> poison, i64 {count}, i32 0")
    every = f"<{lanes} x i32> zeroinitializer"
    counts = code.value(f"shufflevector <{lanes} x i64> {single}, <{lanes} x i64> poison, {every}")
    return code.value(f"icmp slt <{lanes} x i64> {order}, {counts}")


def _tile(vectors: Vectors, dtype: str, size: int, rows: int, whole: bool) -> str:
    """Return ``add_KIND_SIZExROWS(x, w, y, totals, length, pitch, stride, width, last)``.

    ``last`` is how many columns the last of ``size`` vectors has: all, if it is ``whole``.
    """
    lanes, wide = vectors.lanes, vectors.wide
    kind = LLVM_TYPES[dtype]
    code = Code(f"internal void @add_{_name(size, rows, whole)}({_PARAMETERS}{_scales(dtype, '%scales')}) #0")
    mask = first_lanes(code, vectors, "%last")
    starts_x = [code.at("float", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_y = [code.at("float", "%y", code.arithmetic("mul", "%width", row)) for row in range(rows)]

    def read(line: str, each: int) -> str:
        place = code.at("float", line, lanes * each)
        if each < size - 1:
            return code.load(wide, place, 4)
        operands = f"ptr {place}, i32 4, <{lanes} x i1> {mask}, {wide} zeroinitializer"
        return code.value(f"call {wide} @llvm.masked.load.v{lanes}f32.p0({operands})")

    def widened_halves(line: str, each: int) -> str:
        place, halves = code.at(kind, line, lanes * each), f"<{lanes} x {kind}>"
        if whole or each < size - 1:
            numbers = code.load(halves, place, SIZES[kind])
        else:
            load, some = masked_load(lanes, SIZES[kind])
            operands = f"ptr {place}, i32 {SIZES[kind]}, <{lanes} x i1> {mask}, {some} zeroinitializer"
            numbers = code.value(f"bitcast {some} {code.value(f'call {some} {load}({operands})')} to {halves}")
        return code.value(f"fpext {halves} {numbers} to {wide}")

    sums = [read(start, each) for start in starts_y for each in range(size)]
    totals = [code.load(wide, code.at("float", "%totals", lanes * row), 4) for row in range(rows)]
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %further, %loop ]", "%i")
    for index, first in enumerate(sums):
        code.value(f"phi {wide} [ {first}, %entry ], [ %sum{index}, %loop ]", f"%old{index}")
    for row, first in enumerate(totals):
        code.value(f"phi {wide} [ {first}, %entry ], [ %total{row}, %loop ]", f"%old_total{row}")
    line = code.at(kind, "%w", code.arithmetic("mul", "%i", "%stride"))
    if kind == "float":
        parts = [read(line, each) for each in range(size)]
    elif kind == "half":
        parts = [widened_halves(line, each) for each in range(size)]
    else:
        several = [code.load(f"<{lanes} x i8>", code.at("i8", line, lanes * each), 1) for each in range(size)]
        parts = [widened(code, dtype, lanes, each) for each in several]
        scale = vectors.spread(code, code.load_at("float", "%scales", "%i"))
    for row, start in enumerate(starts_x):
        factors = vectors.spread(code, code.load_at("float", start, "%i"))
        code.value(f"fadd {wide} %old_total{row}, {factors}", f"%total{row}")
        factors = factors if not in_bytes(dtype) else code.value(f"fmul {wide} {factors}, {scale}")
        for each, part in enumerate(parts):
            index = row * size + each
            vectors.multiply_add(code, part, factors, f"%old{index}", f"%sum{index}")
    code.value("add i64 %i, 1", "%further")
    code.branch(code.value("icmp slt i64 %further, %length"), "loop", "done")
    code.start("done")
    for row, start in enumerate(starts_y):
        for each in range(size):
            value, place = f"%sum{row * size + each}", code.at("float", start, lanes * each)
            if each < size - 1:
                code.effect(f"store {wide} {value}, ptr {place}, align 4")
            else:
                operands = f"{wide} {value}, ptr {place}, i32 4, <{lanes} x i1> {mask}"
                code.effect(f"call void @llvm.masked.store.v{lanes}f32.p0({operands})")
        code.effect(f"store {wide} %total{row}, ptr {code.at('float', '%totals', lanes * row)}, align 4")
    code.effect("ret void")
    return code.text()


def _scales(dtype: str, name: str) -> str:
    """Return the further argument where there are scales."""
    return f", ptr {name}" if in_bytes(dtype) else ""


def _cover(vectors: Vectors, dtype: str, sizes: list[tuple[int, int, bool]]) -> str:
    """Return ``add_weighted``: tiles over all rows, of as many vectors as the columns need."""
    lanes, most = vectors.lanes, tile_rows(vectors) + 1
    parameters = "ptr %x, ptr %w, ptr %y, ptr %totals, i64 %rows, i64 %length, i64 %pitch, i64 %stride, i64 %width"
    parameters += f", i64 %columns{_scales(dtype, '%scales')}"
    code = Code(f"internal void @add_weighted({parameters}) #0")
    size = code.ceiling("%columns", lanes)
    last = code.arithmetic("sub", "%columns", code.arithmetic("mul", code.arithmetic("sub", size, 1), lanes))
    with code.repeated("each_row", 0, "%rows", tile_rows(vectors)) as each_row:
        row = each_row.index
        count = code.smaller(code.arithmetic("sub", "%rows", row), tile_rows(vectors))
        x = code.at("float", "%x", code.arithmetic("mul", row, "%pitch"))
        y = code.at("float", "%y", code.arithmetic("mul", row, "%width"))
        totals = code.at("float", "%totals", code.arithmetic("mul", row, lanes))
        operands = f"ptr {x}, ptr %w, ptr {y}, ptr {totals}, i64 %length, i64 %pitch, i64 %stride, i64 %width"
        which = code.arithmetic("add", code.arithmetic("mul", size, most), count)
        further = (WIDEST + 1) * most
        if dtype == "float16":
            is_whole = code.value(f"icmp eq i64 {last}, {lanes}")
            which = code.arithmetic("add", which, code.value(f"select i1 {is_whole}, i64 {further}, i64 0"))
        numbers = {each: further * each[2] + each[0] * most + each[1] for each in sizes}
        cases = " ".join(f"i64 {number}, label %{_name(*each)}" for each, number in numbers.items())
        code.effect(f"switch i64 {which}, label %tile_done [ {cases} ]")
        for each in sizes:
            code.start(_name(*each))
            code.effect(f"call void @add_{_name(*each)}({operands}, i64 {last}{_scales(dtype, '%scales')})")
            code.effect("br label %tile_done")
        code.start("tile_done")
    code.effect("ret void")
    return code.text()
