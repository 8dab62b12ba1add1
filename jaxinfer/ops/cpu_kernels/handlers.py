"""XLA's foreign functions: they read shapes out of a call's buffers and share work out to threads.

The structures are those of XLA's C interface for foreign functions, version 0.3
(https://openxla.org/xla/custom_call). Threads are those of XLA's own pool; a pool that is busy costs nothing but its
help, since the thread that was called takes whatever piece is left.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors, declarations

# A call's record, in words of eight bytes: the next piece, those done, and threads that still look at it; then, on
# cache lines that no thread writes to, the number of pieces and what the function has put there.
_NEXT, _DONE, _USERS = range(3)
_PIECES = 16
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


class Record:
    """What the threads of a call read: pointers and 64-bit integers by their names."""

    def __init__(self, *names: str) -> None:
        self._words = {name: _PIECES + 1 + index for index, name in enumerate(names)}

    @property
    def size(self) -> int:
        """How many bytes a record takes."""
        return 8 * (_PIECES + 1 + len(self._words))

    def pointer(self, code: Code, name: str) -> str:
        """Return a pointer out of the record."""
        return code.load_at("ptr", "%record", self._words[name])

    def number(self, code: Code, name: str) -> str:
        """Return an integer out of the record."""
        return code.load_at("i64", "%record", self._words[name])

    def write(self, code: Code, record: str, pointers: dict[str, str], numbers: dict[str, str]) -> None:
        """Fill a record."""
        assert self._words.keys() == pointers.keys() | numbers.keys()
        for name, value in pointers.items():
            code.store_at("ptr", value, record, self._words[name])
        for name, value in numbers.items():
            code.store_at("i64", value, record, self._words[name])


class Buffer(NamedTuple):
    """An argument or a result of a call: where its numbers are, and where its lengths."""

    numbers: str
    lengths: str

    def shape(self, code: Code, axes: int) -> list[str]:
        """Return the first lengths."""
        return [code.load_at("i64", self.lengths, axis) for axis in range(axes)]

    def layer(self, code: Code, layers: str) -> str:
        """Return the layer that an int32 counts as JAX does: from the end if negative, and the last if past it."""
        layer = code.value(f"sext i32 {code.load_at('i32', self.numbers, 0)} to i64")
        is_negative = code.value(f"icmp slt i64 {layer}, 0")
        from_end = code.arithmetic("add", layer, layers)
        layer = code.value(f"select i1 {is_negative}, i64 {from_end}, i64 {layer}")
        return code.larger(code.smaller(layer, code.arithmetic("sub", layers, 1)), 0)


class Plan(NamedTuple):
    """How a call is worked on: what its record holds, how many pieces there are, and how much they read in all."""

    pointers: dict[str, str]
    numbers: dict[str, str]
    pieces: str
    weights: str


def make_module(
    vectors: Vectors,
    functions: list[str],
    record: Record,
    sizes: tuple[int, int],
    plan: Callable[[Code, list[Buffer], list[Buffer], str], Plan],
    has_end: bool = False,
) -> str:
    """Return a module's assembly, whose ``handler(call)`` is what XLA calls.

    ``functions`` define ``piece(record, index)``, which threads call with every index below the number of pieces, and
    if the module ``has_end``, ``end(record)`` to call once all are done. ``plan(code, arguments, results, threads)``
    gets as many buffers as ``sizes`` says, and code that is amid the handler's.
    """
    outside = f"declare ptr @malloc(i64)\ndeclare void @free(ptr)\ndeclare i32 @{_YIELD}()\n"
    # Without it LLVM halves vectors of 512 bits on processors that it thinks better off with 256.
    attributes = f'attributes #0 = {{ "min-legal-vector-width"="{32 * vectors.lanes}" }}\n'
    handler = _handler(record, sizes, plan, has_end, vectors.pause)
    return "".join([outside, declarations(vectors), *functions, _worker(), _forget(), handler, attributes])


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


def _handler(
    record_of: Record,
    sizes: tuple[int, int],
    plan: Callable[[Code, list[Buffer], list[Buffer], str], Plan],
    has_end: bool,
    pause: str,
) -> str:
    """Return ``handler(call)``; ``pause`` rests a waiting thread."""
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
    arguments, results = (
        _buffers(code, code.load_at("ptr", "%call", word), count)
        for word, count in zip((_CALL_ARGUMENTS, _CALL_RESULTS), sizes)
    )
    code.effect(f"store i64 1, ptr {threads}")
    for word, (kind, value) in enumerate((("i64", 32), ("ptr", "null"), ("ptr", context), ("ptr", threads))):
        code.store_at(kind, value, request, word)
    # An error leaves the one thread that was written.
    error = code.value(f"call ptr {code.load_at('ptr', interface, _NUM_THREADS)}(ptr {request})")
    code.value(f"call i64 @forget(ptr {interface}, ptr {error})")
    available = code.load("i64", threads)
    pointers, numbers, pieces, weights = plan(code, arguments, results, available)
    users = code.smaller(code.smaller(available, pieces), code.ceiling(weights, _WEIGHTS_PER_THREAD))
    # This one works on it even if there is nothing to do.
    users = code.larger(users, 1)

    record = code.value(f"call ptr @malloc(i64 {record_of.size})")
    record_of.write(code, record, pointers, numbers)
    # This thread looks at the record once more than the others, to see when all is done.
    for word, number in ((_NEXT, 0), (_DONE, 0), (_USERS, code.arithmetic("add", users, 1)), (_PIECES, pieces)):
        code.store_at("i64", number, record, word)
    for word, (kind, value) in enumerate(
        (("i64", 40), ("ptr", "null"), ("ptr", context), ("ptr", "@worker"), ("ptr", record))
    ):
        code.store_at(kind, value, request, word)
    schedule = code.load_at("ptr", interface, _SCHEDULE)
    done, users_left = (code.at("i64", record, word) for word in (_DONE, _USERS))
    code.effect("br label %before_invite")

    code.start("before_invite")
    code.effect("br label %invite")
    code.start("invite")
    code.value("phi i64 [ 1, %before_invite ], [ %invited, %another ]", "%i")
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
    if has_end:
        code.effect(f"call void @end(ptr {record})")
    _release(code, record, users_left, "ptr null")
    return code.text()


def _buffers(code: Code, places: str, count: int) -> list[Buffer]:
    buffers = [code.load_at("ptr", places, index) for index in range(count)]
    return [
        Buffer(*(code.load_at("ptr", buffer, word) for word in (_BUFFER_NUMBERS, _BUFFER_LENGTHS)))
        for buffer in buffers
    ]


def _release(code: Code, record: str, users: str, result: str = "void") -> None:
    """End a function with a thread's leave of the record."""
    before = code.value(f"atomicrmw sub ptr {users}, i64 1 acq_rel")
    code.branch(code.value(f"icmp eq i64 {before}, 1"), "last", "out")
    code.start("last")
    code.effect(f"call void @free(ptr {record})")
    code.effect("br label %out")
    code.start("out")
    code.effect(f"ret {result}")
