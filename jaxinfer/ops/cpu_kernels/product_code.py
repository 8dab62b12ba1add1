"""The assembly of products: tiles over all rows and outputs, and the foreign functions around them."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.tiles import (
    COLUMN_VECTORS,
    LLVM_TYPES,
    OUTPUTS,
    ROW_TYPES,
    Vectors,
    column_tile,
    dot_tile,
)

# Several pieces per thread even out the threads' other work. `jaxinfer bench latency` measures another value.
_PIECES_PER_THREAD = 4

# The fields of a call's record: shared ones, and those of each matrix.
_SHARED = ("x", "rows", "length", "groups", "first_batch", "per_group", "span")
OF_MATRIX = ("w", "y", "outputs", "stride", "lines", "first_piece")


def dot_module(vectors: Vectors, dtype: str, count: int = 1) -> str:
    """Return the assembly of ``handler(x [I, M, K], l, w [L, B, S, F], ...) -> y [I, M, N], ...``.

    There are ``count`` matrices w, each with its own S, F, y and N. I = B * C, F >= C * K, S >= N. x and w are of
    ``dtype``, but x is bfloat16 if that is int8; y is float32, l int32. Part c of row n of w[l, b] is multiplied with
    the rows of x[b * C + c].
    """
    functions = dot_functions(vectors, dtype)
    return _module(vectors, functions, "dots", dtype, OUTPUTS, count, rows_are_outputs=True)


def column_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [I, M, K], l, w [L, B, S, F]) -> y [I, M, N]``, I = B * C, F >= C * N, S >= K.

    All are float32 except l, an int32. Number k of x[b * C + c] is the factor of part c of row k of w[l, b].
    """
    unit = COLUMN_VECTORS * vectors.lanes
    return _module(vectors, column_functions(vectors), "columns", "float32", unit, 1, rows_are_outputs=False)


def dot_functions(vectors: Vectors, dtype: str) -> list[str]:
    """Return ``dots(x, w, y, rows, outputs, length, pitch, stride, width)`` and its tiles (`dot_tile`)."""
    tiles = [dot_tile(vectors, dtype, outputs, rows) for outputs in (OUTPUTS, 1) for rows in range(1, vectors.rows + 1)]
    return [*tiles, _cover(vectors, "dot", dtype, (OUTPUTS, 1), (OUTPUTS, 1), rows_are_outputs=True)]


def column_functions(vectors: Vectors) -> list[str]:
    """Return ``columns(x, w, y, rows, outputs, length, pitch, stride, width)`` and its tiles (`column_tile`)."""
    names = COLUMN_VECTORS, 1
    tiles = [column_tile(vectors, name, rows) for name in names for rows in range(1, vectors.rows + 1)]
    widths = COLUMN_VECTORS * vectors.lanes, vectors.lanes
    return [*tiles, _cover(vectors, "column", "float32", names, widths, rows_are_outputs=False)]


def _module(
    vectors: Vectors, functions: list[str], name: str, dtype: str, unit: int, count: int, rows_are_outputs: bool
) -> str:
    """Return a module whose outputs are distributed in multiples of ``unit``."""
    record = Record(*_SHARED, *(f"{each}{matrix}" for matrix in range(count) for each in OF_MATRIX))

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, layer, *matrices = arguments
        items, rows, length = x.shape(code, 3)
        layers, batches = matrices[0].shape(code, 2)
        outputs = [y.shape(code, 3)[2] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.ceiling(code.arithmetic("mul", threads, _PIECES_PER_THREAD), items)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), unit), unit)
        pieces = [code.ceiling(each, span) for each in outputs]
        per_group = code.total(pieces)
        pointers = {"x": x.numbers}
        numbers = {
            "rows": rows, "length": length, "groups": code.arithmetic("sdiv", items, batches), "per_group": per_group,
            "first_batch": code.arithmetic("mul", layer.layer(code, layers), batches), "span": span,
        }  # fmt: skip
        for index, (w, y) in enumerate(zip(matrices, results)):
            _, _, lines, stride = w.shape(code, 4)
            pointers |= {f"w{index}": w.numbers, f"y{index}": y.numbers}
            values = outputs[index], stride, lines, code.total(pieces[:index])
            numbers |= {f"{name}{index}": value for name, value in zip(OF_MATRIX[2:], values)}
        weights = code.arithmetic("mul", items, code.arithmetic("mul", all_outputs, length))
        return Plan(pointers, numbers, code.arithmetic("mul", items, per_group), weights)

    functions = [*functions, _piece(record, name, dtype, count, rows_are_outputs)]
    return make_module(vectors, functions, record, (2 + count, count), plan)


def _piece(record: Record, name: str, dtype: str, count: int, rows_are_outputs: bool) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows of one x."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x = record.pointer(code, "x")
    rows, length, groups, first_batch, per_group, span = (record.number(code, each) for each in _SHARED[1:])
    which = code.arithmetic("sdiv", "%index", per_group)
    among = code.arithmetic("srem", "%index", per_group)
    w, y, outputs, stride, lines, first_piece = chosen_matrix(code, record, count, among)
    first = code.arithmetic("mul", code.arithmetic("sub", among, first_piece), span)
    width = code.smaller(span, code.arithmetic("sub", outputs, first))
    of_x = code.arithmetic("mul", which, code.arithmetic("mul", rows, length))
    of_y = code.arithmetic("mul", which, code.arithmetic("mul", rows, outputs))
    batch = code.arithmetic("add", first_batch, code.arithmetic("sdiv", which, groups))
    group = code.arithmetic("srem", which, groups)
    line = code.arithmetic("mul", batch, code.arithmetic("mul", lines, stride))
    of_w = code.arithmetic("add", line, code.arithmetic("mul", group, length if rows_are_outputs else outputs))
    of_w = code.arithmetic("add", of_w, code.arithmetic("mul", first, stride) if rows_are_outputs else first)
    operands = [
        f"ptr {code.at(ROW_TYPES[dtype], x, of_x)}",
        f"ptr {code.at(LLVM_TYPES[dtype], w, of_w)}",
        f"ptr {code.at('float', y, code.arithmetic('add', of_y, first))}",
        *(f"i64 {number}" for number in (rows, width, length, length, stride, outputs)),
    ]
    code.effect(f"call void @{name}({', '.join(operands)})")
    code.effect("ret void")
    return code.text()


def chosen_matrix(code: Code, record: Record, count: int, piece: str) -> list[str]:
    """Load the fields (`OF_MATRIX`) of the matrix, among ``count``, that a piece belongs to."""
    chosen = _matrix(code, record, 0)
    for index in range(1, count):
        other = _matrix(code, record, index)
        is_other = code.value(f"icmp sge i64 {piece}, {other[-1]}")
        kinds = "ptr", "ptr", "i64", "i64", "i64", "i64"
        chosen = [
            code.value(f"select i1 {is_other}, {kind} {new}, {kind} {old}")
            for kind, new, old in zip(kinds, other, chosen)
        ]
    return chosen


def _matrix(code: Code, record: Record, index: int) -> list[str]:
    """Load the fields of one matrix from a record."""
    pointers = [record.pointer(code, f"{name}{index}") for name in OF_MATRIX[:2]]
    return [*pointers, *(record.number(code, f"{name}{index}") for name in OF_MATRIX[2:])]


def _cover(
    vectors: Vectors,
    tile: str,
    dtype: str,
    names: tuple[int, int],
    widths: tuple[int, int],
    rows_are_outputs: bool,
) -> str:
    """Return ``TILEs(x, w, y, rows, outputs, length, pitch, stride, width)``: tiles over all rows and outputs.

    ``names`` and ``widths`` are the names and the outputs of the wide tile and of the tile for the rest.
    """
    parameters = "ptr %x, ptr %w, ptr %y, i64 %rows, i64 %outputs, i64 %length, i64 %pitch, i64 %stride, i64 %width"
    code, kind = Code(f"internal void @{tile}s({parameters}) #0"), LLVM_TYPES[dtype]
    code.effect("br label %output")
    code.start("output")
    code.value("phi i64 [ 0, %entry ], [ %wider, %after_wide ], [ %narrower, %after_narrow ]", "%n")
    code.branch(code.value("icmp slt i64 %n, %outputs"), "some", "end")
    code.start("some")
    this_w = code.at(kind, "%w", code.arithmetic("mul", "%n", "%stride") if rows_are_outputs else "%n")
    this_y = code.at("float", "%y", "%n")
    code.value(f"add i64 %n, {widths[0]}", "%wider")
    code.value(f"add i64 %n, {widths[1]}", "%narrower")
    code.branch(code.value("icmp sle i64 %wider, %outputs"), "wide", "narrow")
    for block, name in zip(("wide", "narrow"), names):
        code.start(block)
        code.effect(f"br label %{block}_rows")
        code.start(f"{block}_rows")
        code.value(f"phi i64 [ 0, %{block} ], [ %{block}_next, %{block}_full ]", f"%{block}_m")
        m = f"%{block}_m"
        row_x = code.at(ROW_TYPES[dtype], "%x", code.arithmetic("mul", m, "%pitch"))
        row_y = code.at("float", this_y, code.arithmetic("mul", m, "%width"))
        left = code.arithmetic("sub", "%rows", m)
        # Tiles prefetch the next tile's weights; for further rows of x, those of later tiles.
        tiles = code.arithmetic("add", code.arithmetic("sdiv", m, vectors.rows), 1)
        line = code.arithmetic("mul", code.arithmetic("mul", tiles, widths[0]), "%stride")
        ahead = code.at(kind, this_w, line) if rows_are_outputs else this_w
        numbers = "i64 %length, i64 %pitch, i64 %stride, i64 %width"
        operands = f"(ptr {row_x}, ptr {this_w}, ptr {row_y}, {numbers}, ptr {ahead})"
        cases = " ".join(f"i64 {count}, label %{block}_{count}" for count in range(vectors.rows))
        code.effect(f"switch i64 {left}, label %{block}_full [ {cases} ]")
        code.start(f"{block}_full")
        code.effect(f"call void @{tile}_{name}x{vectors.rows}{operands}")
        code.value(f"add i64 {m}, {vectors.rows}", f"%{block}_next")
        code.effect(f"br label %{block}_rows")
        for count in range(1, vectors.rows):
            code.start(f"{block}_{count}")
            code.effect(f"call void @{tile}_{name}x{count}{operands}")
            code.effect(f"br label %{block}_0")
        code.start(f"{block}_0")
        code.effect(f"br label %after_{block}")
        code.start(f"after_{block}")
        code.effect("br label %output")
    code.start("end")
    code.effect("ret void")
    return code.text()
