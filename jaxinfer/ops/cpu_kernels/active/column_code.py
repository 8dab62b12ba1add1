"""The assembly of products by columns: lists of active units, tiles over all rows and columns, the order of sums."""

from jaxinfer.ops.cpu_kernels.active.column_tiles import column_tile, pack_function
from jaxinfer.ops.cpu_kernels.active.lists import list_function
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, Vectors

_PIECES_PER_THREAD = 4
# The rows whose sums are in memory at a time.
_ROWS = 20
_RECORD = Record("x", "w", "y", "rows", "units", "outputs", "span")


def column_module(vectors: Vectors, dtype: str) -> str:
    """Return the assembly of ``handler(x [M, F], w [F, N]) -> y [M, N]``.

    w is of ``dtype``, x of its `Vectors.row_dtype`, y float32. Results have the bits of `product_code.dot_module` with
    w transposed, if w is finite. Lines of w whose number of x is zero in all rows are not read.
    """

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, w = arguments
        rows, length = x.shape(code, 2)
        outputs = w.shape(code, 2)[1]
        widest = vectors.lanes * _widths(vectors)[0][1]
        wanted = code.arithmetic("mul", threads, _PIECES_PER_THREAD)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(outputs, wanted), widest), widest)
        units = code.arithmetic("sdiv", length, 2) if vectors.pairs(dtype) else length
        numbers = {"rows": rows, "units": units, "outputs": outputs, "span": span}
        pointers = {"x": x.numbers, "w": w.numbers, "y": results[0].numbers}
        return Plan(pointers, numbers, code.ceiling(outputs, span), code.arithmetic("mul", length, outputs))

    widths = (1, *(size for _, size in _widths(vectors)))
    sizes = [(rows, size) for size in widths for rows in range(1, _tile_rows(vectors, size)[0] + 1)]
    functions = [
        list_function(vectors, vectors.pairs(dtype), vectors.lanes),
        *(column_tile(vectors, dtype, *each) for each in sizes),
        pack_function(vectors, dtype, _widths(vectors)[0][1]),
        *(_columns(vectors, dtype, size) for size in widths),
        _piece(vectors, dtype),
    ]
    return make_module(vectors, functions, _RECORD, (2, 1), plan)


def _widths(vectors: Vectors) -> list[tuple[int, int]]:
    """Return the most rows of all, and for these the vectors of columns of a tile: what fits the registers."""
    return [(_ROWS, 4), (2, 8), (1, 16)] if vectors.rows >= 6 else [(_ROWS, 4), (1, 8)]


def _tile_rows(vectors: Vectors, size: int) -> tuple[int, int]:
    """Return the most rows of a tile of so many vectors of columns, and of a block, whose sums are in memory."""
    block = {size: rows for rows, size in _widths(vectors)}.get(size, _ROWS)
    # A register for each sum, each vector of columns and each row's number.
    return min(block, 5 if vectors.rows >= 6 else 2), block


def _columns(vectors: Vectors, dtype: str, size: int) -> str:
    """Return ``columns_SIZE(x, w, y, lists, room, counts, sums, rows, pitch, stride, width, columns, packed)``.

    It computes some columns for all rows, and returns whether some result is -0.
    """
    lanes, wide = vectors.lanes, vectors.wide
    most, of_block = _tile_rows(vectors, size)
    parameters = "ptr %x, ptr %w, ptr %y, ptr %lists, i64 %room, ptr %counts, ptr %sums, i64 %rows, i64 %pitch, "
    parameters += "i64 %stride, i64 %width, i64 %columns, ptr %packed"
    code = Code(f"internal i1 @columns_{size}({parameters}) #0")
    mask = vectors.first(code, lanes, "%columns")
    none = "zeroinitializer"
    negative = f"<{lanes} x i1>"
    of_class = of_block * size * lanes
    with code.repeated("each_block", 0, "%rows", of_block, (negative, none)) as block:
        count = code.smaller(code.arithmetic("sub", "%rows", block.index), of_block)
        tiles = even_tiles(code, count, most)
        with code.repeated("each_class", 0, lanes) as each:
            listed = code.at("i32", "%lists", code.arithmetic("mul", each.index, "%room"))
            number = code.load_at("i64", "%counts", each.index)
            sums = code.at("float", "%sums", code.arithmetic("mul", each.index, of_class))
            lines, stride, is_packed = "%w", "%stride", "false"
            if size == _widths(vectors)[0][1]:
                is_packed = code.value(f"icmp sgt i64 {tiles.count}, 1")
                code.branch(is_packed, "pack", "multiply")
                code.start("pack")
                code.effect(f"call void @pack_{size}(ptr %w, ptr {listed}, i64 {number}, ptr %packed, i64 %stride)")
                code.effect("br label %multiply")
                code.start("multiply")
                lines = code.value(f"select i1 {is_packed}, ptr %packed, ptr %w")
                stride = code.value(f"select i1 {is_packed}, i64 {size * lanes}, i64 %stride")
            with each_tile(code, tiles) as tile:
                row = code.arithmetic("add", block.index, tile.row)
                x = code.at("i32", "%x", code.arithmetic("mul", row, "%pitch"))
                own = code.at("float", sums, code.arithmetic("mul", tile.row, size * lanes))
                function = chosen_tile(code, tile.count, most, lambda rows: f"@active_{rows}x{size}")
                operands = f"ptr {x}, ptr {lines}, ptr {listed}, i64 {number}, ptr {own}, i64 %pitch, i64 {stride}"
                operands += f", i64 %columns, i1 {is_packed}"
                code.effect(f"call void {function}({operands})")
        with code.repeated("each_row", 0, count, 1, (negative, block.held)) as each_row:
            row = code.arithmetic("add", block.index, each_row.index)
            y = code.at("float", "%y", code.arithmetic("mul", row, "%width"))
            own = code.at("float", "%sums", code.arithmetic("mul", each_row.index, size * lanes))
            found = each_row.held
            for part in range(size):
                of_classes = [
                    code.load(wide, code.at("float", own, each * of_class + part * lanes), 64) for each in range(lanes)
                ]
                while len(of_classes) > 1:
                    of_classes = [
                        code.value(f"fadd {wide} {one}, {other}")
                        for one, other in zip(of_classes[::2], of_classes[1::2])
                    ]
                (total,) = of_classes
                bits = code.value(f"bitcast {wide} {total} to <{lanes} x i32>")
                sign = f"<{', '.join([f'i32 {-(2**31)}'] * lanes)}>"
                is_negative = code.value(f"icmp eq <{lanes} x i32> {bits}, {sign}")
                found = code.value(f"or {negative} {found}, {is_negative}")
                place = code.at("float", y, part * lanes)
                if size == 1:
                    operands = f"{wide} {total}, ptr {place}, i32 4, <{lanes} x i1> {mask}"
                    code.effect(f"call void @llvm.masked.store.v{lanes}f32.p0({operands})")
                else:
                    code.effect(f"store {wide} {total}, ptr {place}, align 4")
            each_row.left = found
        block.left = each_row.held
    code.effect(f"ret i1 {code.value(f'call i1 @llvm.vector.reduce.or.v{lanes}i1({negative} {block.held})')}")
    declared = f"declare void @llvm.masked.store.v{lanes}f32.p0({wide}, ptr, i32 immarg, <{lanes} x i1>)\n"
    return declared + f"declare i1 @llvm.vector.reduce.or.v{lanes}i1({negative})\n" + code.text()


def _piece(vectors: Vectors, dtype: str) -> str:
    """Return ``piece(record, index)``, which computes ``span`` columns for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    kind, lanes = LLVM_TYPES[dtype], vectors.lanes
    x, w, y = (_RECORD.pointer(code, name) for name in ("x", "w", "y"))
    rows, units, outputs, span = (_RECORD.number(code, name) for name in ("rows", "units", "outputs", "span"))
    first = code.arithmetic("mul", "%index", span)
    past = code.smaller(code.arithmetic("add", first, span), outputs)
    counts = code.value(f"alloca [{lanes} x i64], align 64")
    room = code.arithmetic("add", code.ceiling(units, lanes), 1)
    of_sums = 4 * lanes * lanes * max(rows * size for rows, size in _widths(vectors))
    of_packed = code.arithmetic("mul", room, 4 * lanes * _widths(vectors)[0][1])
    size = code.total([code.arithmetic("mul", room, 4 * lanes), of_packed, str(of_sums), "64"])
    memory = code.value(f"call ptr @malloc(i64 {size})")
    offset = code.arithmetic("and", code.value(f"ptrtoint ptr {memory} to i64"), 63)
    sums = code.at("i8", memory, code.arithmetic("sub", 64, offset))
    packed = code.at("i8", sums, of_sums)
    lists = code.at("i8", packed, of_packed)
    listing = f"ptr {x}, i64 {rows}, i64 {units}, i64 {units}"
    code.effect(f"call void @list_active({listing}, i1 false, ptr {lists}, i64 {room}, ptr {counts})")
    widths = _widths(vectors)
    wide = str(widths[0][1])
    for most_rows, size_ in widths[1:]:
        fits = code.value(f"icmp sle i64 {rows}, {most_rows}")
        wide = code.value(f"select i1 {fits}, i64 {size_}, i64 {wide}")
    code.effect("br label %next")
    code.start("next")
    code.value(f"phi i64 [ {first}, %entry ], [ %after, %go_on ], [ %place, %list_all ]", "%place")
    code.value("phi i1 [ false, %entry ], [ %has_all, %go_on ], [ true, %list_all ]", "%has_all")
    code.branch(code.value(f"icmp slt i64 %place, {past}"), "some", "release")
    code.start("some")
    left = code.arithmetic("sub", past, "%place")
    part_w, part_y = code.at(kind, w, "%place"), code.at("float", y, "%place")
    columns = code.smaller(left, lanes)
    operands = (
        f"ptr {x}, ptr {part_w}, ptr {part_y}, ptr {lists}, i64 {room}, ptr {counts}, ptr {sums}, i64 {rows}, "
        f"i64 {units}, i64 {outputs}, i64 {outputs}, i64 {columns}, ptr {packed}"
    )
    # As wide as rows and columns allow, or one vector.
    chosen, vectors_done = "@columns_1", "1"
    for _, size_ in widths:
        allowed = code.value(f"icmp sge i64 {wide}, {size_}")
        fits = code.value(f"icmp sge i64 {left}, {size_ * lanes}")
        both = code.value(f"and i1 {allowed}, {fits}")
        chosen = code.value(f"select i1 {both}, ptr @columns_{size_}, ptr {chosen}")
        vectors_done = code.value(f"select i1 {both}, i64 {size_}, i64 {vectors_done}")
    is_negative = code.value(f"call i1 {chosen}({operands})")
    code.value(f"add i64 %place, {code.arithmetic('mul', vectors_done, lanes)}", "%after")
    # A sum of nothing but underflows may be -0 where a zero that was left out makes it +0.
    again = code.value(f"and i1 {is_negative}, {code.value('xor i1 %has_all, true')}")
    code.branch(again, "list_all", "go_on")
    code.start("list_all")
    code.effect(f"call void @list_active({listing}, i1 true, ptr {lists}, i64 {room}, ptr {counts})")
    code.effect("br label %next")
    code.start("go_on")
    code.effect("br label %next")
    code.start("release")
    code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()
