"""XLA's foreign functions around the tiles: they read shapes out of a call's buffers and share work out to threads.

The structures are those of XLA's C interface for foreign functions, version 0.3
(https://openxla.org/xla/custom_call). Threads are those of XLA's own pool; a pool that is busy costs nothing but its
help, since the thread that was called takes whatever piece is left.
"""

import os

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

# A call's record, in words of eight bytes: the next piece, those done, and threads that still look at it; then, on
# cache lines that no thread writes to, the number of pieces and the operands.
_NEXT, _DONE, _USERS = range(3)
_PIECES, _X, _W, _Y = range(16, 20)
_ROWS, _LENGTH, _OUTPUTS, _STRIDE, _LINES, _GROUPS, _FIRST, _PER_GROUP, _SPAN = range(20, 29)
_RECORD_WORDS = 29
# Several pieces for each thread even out what else the threads have to do.
_PIECES_PER_THREAD = 4
# Weights that are worth another thread: one that sleeps takes about as long to come as these take to be read.
_WEIGHTS_PER_THREAD = 32_768
# A thread that waits for others' last pieces rests this often before it leaves its processor to whoever wants it.
_RESTS = 2_000
_YIELD = "SwitchToThread" if os.name == "nt" else "sched_yield"

# Words of XLA's structures: of a call, its interface and context and the pointers to arguments and results; of a
# buffer, its numbers and lengths; of the interface, some of its functions; of an extension, its type, `_METADATA` for
# one that asks for the version, and where that goes.
_METADATA = 1
_CALL_EXTENSION, _CALL_INTERFACE, _CALL_CONTEXT, _CALL_ARGUMENTS, _CALL_RESULTS = 1, 2, 3, 9, 14
_BUFFER_NUMBERS, _BUFFER_LENGTHS = 3, 5
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 8, 17, 18
_EXTENSION_TYPE, _EXTENSION_METADATA, _METADATA_VERSION = 1, 3, 3
_VERSION = 3 << 32  # 0.3, as two integers of four bytes


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
    outside = f"declare ptr @malloc(i64)\ndeclare void @free(ptr)\ndeclare i32 @{_YIELD}()\n"
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
        # What the tiles ask for ahead: the next tile's weights, and with further rows of x those of tiles after it.
        tiles = code.arithmetic("add", code.arithmetic("sdiv", m, vectors.rows), 1)
        line = code.arithmetic("mul", code.arithmetic("mul", tiles, widths[0]), stride)
        ahead = code.at(kind, this_w, line) if rows_are_outputs else this_w
        operands = f"(ptr {row_x}, ptr {this_w}, ptr {row_y}, i64 {length}, i64 {stride}, i64 {outputs}, ptr {ahead})"
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
    code.branch(code.value(f"icmp eq ptr {extension}, null"), "execute", "extended")
    code.start("extended")
    kind = code.load("i32", code.at("i64", extension, _EXTENSION_TYPE))
    code.branch(code.value(f"icmp eq i32 {kind}, {_METADATA}"), "describe", "execute")
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
    layers, batches, lines, stride = (code.load_at("i64", shapes[1], axis) for axis in range(4))
    layer = code.load_at("i32", code.load_at("ptr", code.load_at("ptr", arguments, 2), _BUFFER_NUMBERS), 0)
    layer = code.value(f"sext i32 {layer} to i64")
    # As JAX's indices do: a negative one counts from the end, and one past it is the last.
    is_negative = code.value(f"icmp slt i64 {layer}, 0")
    from_end = code.arithmetic("add", layer, layers)
    layer = code.value(f"select i1 {is_negative}, i64 {from_end}, i64 {layer}")
    layer = code.larger(code.smaller(layer, code.arithmetic("sub", layers, 1)), 0)
    first_batch = code.arithmetic("mul", layer, batches)
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
    weights = code.arithmetic("mul", count, code.arithmetic("mul", outputs, length))
    users = code.smaller(code.smaller(available, pieces), code.ceiling(weights, _WEIGHTS_PER_THREAD))

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
    code.value("phi i64 [ 0, %share ], [ %rested, %rest ], [ %rested, %yield ]", "%rests")
    finished = code.value(f"load atomic i64, ptr {done} acquire, align 8")
    code.branch(code.value(f"icmp slt i64 {finished}, {pieces}"), "more", "end")
    code.start("more")
    code.value("add i64 %rests, 1", "%rested")
    code.branch(code.value(f"icmp slt i64 %rests, {_RESTS}"), "rest", "yield")
    code.start("rest")
    code.effect(f"call {pause}")
    code.effect("br label %wait")
    code.start("yield")
    code.value(f"call i32 @{_YIELD}()")
    code.effect("br label %wait")
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
