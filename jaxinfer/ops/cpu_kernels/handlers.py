"""XLA's foreign functions around the tiles: they read shapes out of a call's buffers and share work out to threads.

The structures are those of XLA's C interface for foreign functions, version 0.1 and later
(https://openxla.org/xla/custom_call). Threads are those of XLA's own pool; a pool that is busy costs nothing but its
help, since the thread that was called takes whatever piece is left.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import (
    COLUMN_VECTORS,
    LLVM_TYPES,
    OUTPUTS,
    Vectors,
    column_tile,
    declarations,
    dot_tile,
)

# A call's record, in words of eight bytes: the next piece, those done, threads that still look at it, and the operands.
_NEXT, _DONE, _USERS, _PIECES, _X, _W, _Y = range(7)
_ROWS, _LENGTH, _OUTPUTS, _STRIDE, _LINES, _GROUPS, _FIRST, _PER_GROUP, _SPAN = range(7, 16)
_RECORD_WORDS = 16
# Several pieces for each thread even out what else the threads have to do.
_PIECES_PER_THREAD = 4

# Words of XLA's structures: of a call, its interface and context and the pointers to arguments and results; of a
# buffer, its numbers and lengths; of the interface, some of its functions; of an extension, what it asks for.
_CALL_EXTENSION, _CALL_INTERFACE, _CALL_CONTEXT, _CALL_ARGUMENTS, _CALL_RESULTS = 1, 2, 3, 9, 14
_BUFFER_NUMBERS, _BUFFER_LENGTHS = 3, 5
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 8, 17, 18
_EXTENSION_METADATA, _METADATA_VERSION = 3, 3
_VERSION = 1 << 32  # 0.1, as two integers of four bytes


def dot_module(vectors: Vectors, dtype: str) -> str:
    """Return the assembly of ``handler(x [I, M, K], w [L, B, S, F], l) -> y [I, M, N]``, I = B * C, F >= C * K, S >= N.

    x and w are of ``dtype``, y is float32, l int32; part c of row n of w[l, b] meets the rows of x[b * C + c].
    """
    tiles = [dot_tile(vectors, dtype, outputs, rows) for outputs in (OUTPUTS, 1) for rows in range(1, vectors.rows + 1)]
    piece = _piece(vectors, "dot", LLVM_TYPES[dtype], (OUTPUTS, 1), (OUTPUTS, 1), rows_are_outputs=True)
    return _module(vectors, tiles, piece, OUTPUTS)


def column_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [I, M, K], w [L, B, S, F], l) -> y [I, M, N]``, I = B * C, F >= C * N, S >= K.

    All float32 but l, an int32; number k of x[b * C + c] is the factor of part c of row k of w[l, b].
    """
    widths = (COLUMN_VECTORS, 1)
    tiles = [column_tile(vectors, width, rows) for width in widths for rows in range(1, vectors.rows + 1)]
    columns = (COLUMN_VECTORS * vectors.lanes, vectors.lanes)
    piece = _piece(vectors, "columns", "float", widths, columns, rows_are_outputs=False)
    return _module(vectors, tiles, piece, columns[0])


def _module(vectors: Vectors, tiles: list[str], piece: str, unit: int) -> str:
    outside = "declare ptr @malloc(i64)\ndeclare void @free(ptr)\n"
    # Without it LLVM halves vectors of 512 bits on processors that it thinks better off with 256.
    attributes = f'attributes #0 = {{ "min-legal-vector-width"="{32 * vectors.lanes}" }}\n'
    functions = [*tiles, piece, _worker(), _forget(), _handler(unit, vectors.pause)]
    return "".join([outside, declarations(vectors), *functions, attributes])


def _piece(
    vectors: Vectors, tile: str, kind: str, names: tuple[int, int], widths: tuple[int, int], rows_are_outputs: bool
) -> str:
    """Return ``piece(record, index)``, which computes ``_SPAN`` outputs of all rows of one x.

    ``names`` are those of the wide tile and of the one for what is left, ``widths`` their outputs.
    """
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x, w, y = (code.load_at("ptr", "%record", word) for word in (_X, _W, _Y))
    words = (_ROWS, _LENGTH, _OUTPUTS, _STRIDE, _LINES, _GROUPS, _FIRST, _PER_GROUP, _SPAN)
    rows, length, outputs, stride, lines, groups, first_batch, per_group, span = (
        code.load_at("i64", "%record", word) for word in words
    )
    which = code.arithmetic("sdiv", "%index", per_group)
    first = code.arithmetic("mul", code.arithmetic("srem", "%index", per_group), span)
    last = code.smaller(code.arithmetic("add", first, span), outputs)
    of_x = code.arithmetic("mul", which, code.arithmetic("mul", rows, length))
    of_y = code.arithmetic("mul", which, code.arithmetic("mul", rows, outputs))
    batch = code.arithmetic("add", first_batch, code.arithmetic("sdiv", which, groups))
    group = code.arithmetic("srem", which, groups)
    line = code.arithmetic("mul", batch, code.arithmetic("mul", lines, stride))
    lanes = length if rows_are_outputs else outputs
    of_w = code.arithmetic("add", line, code.arithmetic("mul", group, lanes))
    x, w, y = code.at(kind, x, of_x), code.at(kind, w, of_w), code.at("float", y, of_y)
    code.effect("br label %output")

    code.start("output")
    code.value(f"phi i64 [ {first}, %entry ], [ %wider, %after_wide ], [ %narrower, %after_narrow ]", "%n")
    code.branch(code.value(f"icmp slt i64 %n, {last}"), "some", "end")
    code.start("some")
    this_w = code.at(kind, w, code.arithmetic("mul", "%n", stride) if rows_are_outputs else "%n")
    this_y = code.at("float", y, "%n")
    code.value(f"add i64 %n, {widths[0]}", "%wider")
    code.value(f"add i64 %n, {widths[1]}", "%narrower")
    code.branch(code.value(f"icmp sle i64 %wider, {last}"), "wide", "narrow")
    for block, name in zip(("wide", "narrow"), names):
        code.start(block)
        code.effect(f"br label %{block}_rows")
        code.start(f"{block}_rows")
        code.value(f"phi i64 [ 0, %{block} ], [ %{block}_next, %{block}_full ]", f"%{block}_m")
        m = f"%{block}_m"
        row_x = code.at(kind, x, code.arithmetic("mul", m, length))
        row_y = code.at("float", this_y, code.arithmetic("mul", m, outputs))
        left = code.arithmetic("sub", rows, m)
        operands = f"(ptr {row_x}, ptr {this_w}, ptr {row_y}, i64 {length}, i64 {stride}, i64 {outputs})"
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


def _worker() -> str:
    """Return ``worker(record)``, which takes pieces until none is left; who leaves last frees the record."""
    code = Code("internal void @worker(ptr %record)")
    next_piece, done, users = (code.at("i64", "%record", word) for word in (_NEXT, _DONE, _USERS))
    pieces = code.load_at("i64", "%record", _PIECES)
    code.effect("br label %take")
    code.start("take")
    index = code.value(f"atomicrmw add ptr {next_piece}, i64 1 monotonic")
    code.branch(code.value(f"icmp slt i64 {index}, {pieces}"), "work", "leave")
    code.start("work")
    code.effect(f"call void @piece(ptr %record, i64 {index})")
    code.value(f"atomicrmw add ptr {done}, i64 1 release")
    code.effect("br label %take")
    code.start("leave")
    _release(code, "%record", users)
    return code.text()


def _forget() -> str:
    """Return ``forget(interface, error)``, which frees an error and counts it: 1, or 0 if there is none."""
    code = Code("internal i64 @forget(ptr %interface, ptr %error)")
    request = code.value("alloca [3 x i64]")
    code.branch(code.value("icmp eq ptr %error, null"), "none", "some")
    code.start("none")
    code.effect("ret i64 0")
    code.start("some")
    for word, (kind, value) in enumerate((("i64", 24), ("ptr", "null"), ("ptr", "%error"))):
        code.store_at(kind, value, request, word)
    code.effect(f"call void {code.load_at('ptr', '%interface', _DESTROY_ERROR)}(ptr {request})")
    code.effect("ret i64 1")
    return code.text()


def _handler(unit: int, pause: str) -> str:
    """Return ``handler(call)``; outputs are shared out in multiples of ``unit``, ``pause`` rests a waiting thread."""
    code = Code("ptr @handler(ptr %call)")
    request = code.value("alloca [5 x i64]")
    threads = code.value("alloca i64")
    extension = code.load_at("ptr", "%call", _CALL_EXTENSION)
    # A call that carries an extension asks which version of the interface this is made for.
    code.branch(code.value(f"icmp eq ptr {extension}, null"), "execute", "describe")
    code.start("describe")
    metadata = code.load_at("ptr", extension, _EXTENSION_METADATA)
    code.store_at("i64", _VERSION, metadata, _METADATA_VERSION)
    code.effect("ret ptr null")

    code.start("execute")
    interface = code.load_at("ptr", "%call", _CALL_INTERFACE)
    context = code.load_at("ptr", "%call", _CALL_CONTEXT)
    arguments = code.load_at("ptr", "%call", _CALL_ARGUMENTS)
    results = code.load_at("ptr", "%call", _CALL_RESULTS)
    buffers = [code.load_at("ptr", arguments, 0), code.load_at("ptr", arguments, 1), code.load_at("ptr", results, 0)]
    x, w, y = (code.load_at("ptr", buffer, _BUFFER_NUMBERS) for buffer in buffers)
    shapes = [code.load_at("ptr", buffer, _BUFFER_LENGTHS) for buffer in buffers]
    count, rows, length = (code.load_at("i64", shapes[0], axis) for axis in range(3))
    batches, lines, stride = (code.load_at("i64", shapes[1], axis) for axis in range(1, 4))
    layer = code.load_at("i32", code.load_at("ptr", code.load_at("ptr", arguments, 2), _BUFFER_NUMBERS), 0)
    first_batch = code.arithmetic("mul", code.value(f"sext i32 {layer} to i64"), batches)
    outputs = code.load_at("i64", shapes[2], 2)

    code.effect(f"store i64 1, ptr {threads}")
    for word, (kind, value) in enumerate((("i64", 32), ("ptr", "null"), ("ptr", context), ("ptr", threads))):
        code.store_at(kind, value, request, word)
    # An error leaves the one thread that was written.
    error = code.value(f"call ptr {code.load_at('ptr', interface, _NUM_THREADS)}(ptr {request})")
    code.value(f"call i64 @forget(ptr {interface}, ptr {error})")
    available = code.load("i64", threads)
    wanted = code.ceiling(code.arithmetic("mul", available, _PIECES_PER_THREAD), count)
    span = code.arithmetic("mul", code.ceiling(code.ceiling(outputs, wanted), unit), unit)
    per_group = code.ceiling(outputs, span)
    pieces = code.arithmetic("mul", count, per_group)
    users = code.smaller(available, pieces)

    record = code.value(f"call ptr @malloc(i64 {8 * _RECORD_WORDS})")
    operands = ((_X, x), (_W, w), (_Y, y))
    for word, value in operands:
        code.store_at("ptr", value, record, word)
    # This thread looks at the record once more than the others, to see when all is done.
    users_and_one = code.arithmetic("add", users, 1)
    numbers = {
        _NEXT: 0, _DONE: 0, _USERS: users_and_one, _PIECES: pieces, _ROWS: rows, _LENGTH: length, _OUTPUTS: outputs,
        _STRIDE: stride, _LINES: lines, _GROUPS: code.arithmetic("sdiv", count, batches), _FIRST: first_batch,
        _PER_GROUP: per_group, _SPAN: span,
    }  # fmt: skip
    for word, value in numbers.items():
        code.store_at("i64", value, record, word)
    for word, (kind, value) in enumerate(
        (("i64", 40), ("ptr", "null"), ("ptr", context), ("ptr", "@worker"), ("ptr", record))
    ):
        code.store_at(kind, value, request, word)
    schedule = code.load_at("ptr", interface, _SCHEDULE)
    done, users_left = (code.at("i64", record, word) for word in (_DONE, _USERS))
    code.effect("br label %invite")

    code.start("invite")
    code.value("phi i64 [ 1, %execute ], [ %invited, %another ]", "%i")
    code.branch(code.value(f"icmp slt i64 %i, {users}"), "another", "share")
    code.start("another")
    error = code.value(f"call ptr {schedule}(ptr {request})")
    refused = code.value(f"call i64 @forget(ptr {interface}, ptr {error})")
    code.value(f"atomicrmw sub ptr {users_left}, i64 {refused} monotonic")
    code.value("add i64 %i, 1", "%invited")
    code.effect("br label %invite")
    code.start("share")
    code.effect(f"call void @worker(ptr {record})")
    code.effect("br label %wait")
    code.start("wait")
    code.effect(f"call {pause}")
    finished = code.value(f"load atomic i64, ptr {done} acquire, align 8")
    code.branch(code.value(f"icmp slt i64 {finished}, {pieces}"), "wait", "end")
    code.start("end")
    _release(code, record, users_left, "ptr null")
    return code.text()


def _release(code: Code, record: str, users: str, result: str = "void") -> None:
    """End a function with a thread's leave of the record."""
    before = code.value(f"atomicrmw sub ptr {users}, i64 1 acq_rel")
    code.branch(code.value(f"icmp eq i64 {before}, 1"), "last", "out")
    code.start("last")
    code.effect(f"call void @free(ptr {record})")
    code.effect("br label %out")
    code.start("out")
    code.effect(f"ret {result}")
