"""The assembly of products with chosen rows of weights: of a feature that is zero in all rows, none is read."""

from jaxinfer.ops.cpu_kernels.active.lists import list_function
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.dot_tiles import dot_tile
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, Vectors

_PIECES_PER_THREAD = 4
_RECORD = Record("x", "active", "w", "y", "rows", "length", "outputs", "span")


def row_module(vectors: Vectors, dtype: str) -> str:
    """Return the assembly of ``handler(x [M, K], a [M, F], w [F, K]) -> y [M, F]``.

    w is of ``dtype``, x of its `Vectors.row_dtype`, a and y float32. Where a column of a is zero in all rows, y is zero
    and w is not read; elsewhere y has the bits of `product_code.dot_module`.
    """

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, active, w = arguments
        rows, length = x.shape(code, 2)
        (outputs,) = w.shape(code, 1)
        wanted = code.arithmetic("mul", threads, _PIECES_PER_THREAD)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(outputs, wanted), vectors.lanes), vectors.lanes)
        numbers = {"rows": rows, "length": length, "outputs": outputs, "span": span}
        pointers = {"x": x.numbers, "active": active.numbers, "w": w.numbers, "y": results[0].numbers}
        return Plan(pointers, numbers, code.ceiling(outputs, span), code.arithmetic("mul", length, outputs))

    tiles = [dot_tile(vectors, dtype, 1, rows) for rows in range(1, vectors.rows + 1)]
    functions = [list_function(vectors, False, 1), *tiles, _piece(vectors, dtype)]
    return make_module(vectors, functions, _RECORD, (3, 1), plan)


def _piece(vectors: Vectors, dtype: str) -> str:
    """Return ``piece(record, index)``, which computes the active ones of ``span`` outputs for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    kind, row_kind, most = LLVM_TYPES[dtype], LLVM_TYPES[vectors.row_dtype(dtype)], vectors.rows
    x, active, w, y = (_RECORD.pointer(code, name) for name in ("x", "active", "w", "y"))
    rows, length, outputs, span = (_RECORD.number(code, name) for name in ("rows", "length", "outputs", "span"))
    first = code.arithmetic("mul", "%index", span)
    width = code.smaller(span, code.arithmetic("sub", outputs, first))
    active, y = (code.at("float", pointer, first) for pointer in (active, y))
    w = code.at(kind, w, code.arithmetic("mul", first, length))
    size = code.arithmetic("mul", width, 4)
    with code.repeated("each_zeros", 0, rows) as each:
        place = code.at("float", y, code.arithmetic("mul", each.index, outputs))
        code.effect(f"call void @llvm.memset.p0.i64(ptr {place}, i8 0, i64 {size}, i1 false)")
    counts = code.value("alloca i64")
    room = code.arithmetic("add", width, 1)
    listed = code.value(f"call ptr @malloc(i64 {code.arithmetic('mul', room, 4)})")
    listing = f"ptr {active}, i64 {rows}, i64 {width}, i64 {outputs}, i1 false, ptr {listed}, i64 {room}, ptr {counts}"
    code.effect(f"call void @list_active({listing})")
    count = code.load("i64", counts)
    last = code.arithmetic("sub", count, 1)
    tiles = even_tiles(code, rows, most)
    with code.repeated("each_output", 0, count) as each:
        later = code.smaller(code.arithmetic("add", each.index, 1), last)
        here, ahead = (
            code.value(f"zext i32 {code.load_at('i32', listed, index)} to i64") for index in (each.index, later)
        )
        own, next_own = (code.at(kind, w, code.arithmetic("mul", index, length)) for index in (here, ahead))
        with each_tile(code, tiles) as tile:
            tile_x = code.at(row_kind, x, code.arithmetic("mul", tile.row, length))
            row_y = code.at("float", y, code.arithmetic("mul", tile.row, outputs))
            function = chosen_tile(code, tile.count, most, "@dot_1x{}".format)
            pointers = f"ptr {tile_x}, ptr {own}, ptr {code.at('float', row_y, here)}, ptr null"
            numbers = ", ".join(f"i64 {number}" for number in (length, length, length, outputs))
            code.effect(
                f"call void {function}({pointers}, {numbers}, ptr {next_own}, i64 0, i64 0, i64 1, i1 true, i1 true)"
            )
    code.effect(f"call void @free(ptr {listed})")
    code.effect("ret void")
    return "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n" + code.text()
