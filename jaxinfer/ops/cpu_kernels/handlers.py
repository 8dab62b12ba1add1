"""Foreign functions of XLA: they read shapes from a call's buffers and distribute work to threads.

The structures are those of XLA's C interface for foreign functions, version 0.3 (https://openxla.org/xla/custom_call).
The threads come from XLA's own pool. If the pool is busy, the calling thread does all the work.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors, declarations

# A call's record, in words of eight bytes: the next piece, the number of done pieces, and the number of threads that
# use the record. Then, on cache lines that no thread writes to, the number of pieces and the function's own data.
_NEXT, _DONE, _USERS = range(3)
_PIECES = 16
# The number of weights that justify another thread: reading them takes about as long as waking it. `jaxinfer bench
# latency` measures another value.
_WEIGHTS_PER_THREAD = 32_768
# How often a waiting thread pauses before it yields its processor. `jaxinfer bench latency` measures another value.
_RESTS = 2_000
_YIELD = "SwitchToThread" if os.name == "nt" else "sched_yield"

# Word offsets in XLA's structures: of a call, its interface, context, arguments and results; of a buffer, its numbers
# and lengths; of the interface, some of its functions; of an extension, its type (`_METADATA` asks for the version) and
# where to write the version.
_METADATA = 1
_CALL_EXTENSION, _CALL_INTERFACE, _CALL_CONTEXT, _CALL_ARGUMENTS, _CALL_RESULTS = 1, 2, 3, 9, 14
_BUFFER_NUMBERS, _BUFFER_LENGTHS = 3, 5
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 8, 17, 18
_EXTENSION_TYPE, _EXTENSION_METADATA, _METADATA_VERSION = 1, 3, 3
_VERSION = 3 << 32  # 0.3, as two integers of four bytes


class Record:
    """The data of a call that its threads read: pointers and 64-bit integers by name."""

    def __init__(self, *names: str) -> None:
        self._words = {name: _PIECES + 1 + index for index, name in enumerate(names)}

    @property
    def size(self) -> int:
        """The bytes of a record."""
        return 8 * (_PIECES + 1 + len(self._words))

    def pointer(self, code: Code, name: str) -> str:
        """Load a pointer from the record."""
        return code.load_at("ptr", "%record", self._words[name])

    def number(self, code: Code, name: str) -> str:
        """Load an integer from the record."""
        return code.load_at("i64", "%record", self._words[name])

    def write(self, code: Code, record: str, pointers: dict[str, str], numbers: dict[str, str]) -> None:
        """Fill a record."""
        assert self._words.keys() == pointers.keys() | numbers.keys()
        for name, value in pointers.items():
            code.store_at("ptr", value, record, self._words[name])
        for name, value in numbers.items():
            code.store_at("i64", value, record, self._words[name])


class Buffer(NamedTuple):
    """An argument or a result of a call: the addresses of its numbers and its lengths."""

    numbers: str
    lengths: str

    def shape(self, code: Code, axes: int) -> list[str]:
        """Return the first ``axes`` lengths."""
        return [code.load_at("i64", self.lengths, axis) for axis in range(axes)]

    def layer(self, code: Code, layers: str) -> str:
        """Return the layer of an int32 index as in JAX: a negative one counts from the end, a large one is clipped."""
        layer = code.value(f"sext i32 {code.load_at('i32', self.numbers, 0)} to i64")
        is_negative = code.value(f"icmp slt i64 {layer}, 0")
        from_end = code.arithmetic("add", layer, layers)
        layer = code.value(f"select i1 {is_negative}, i64 {from_end}, i64 {layer}")
        return code.larger(code.smaller(layer, code.arithmetic("sub", layers, 1)), 0)


class Plan(NamedTuple):
    """How to process a call: the content of its record, the number of pieces, and the weights that they read in all."""

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
    """Return a module's assembly; XLA calls its ``handler(call)``.

    ``functions`` define ``piece(record, index)``, which threads call for every index below the number of pieces. If the
    module ``has_end``, they also define ``end(record)``, called after all pieces. ``plan(code, arguments, results,
    threads)`` gets as many buffers as ``sizes`` says, and the handler's code, which it continues.
    """
    outside = f"declare ptr @malloc(i64)\ndeclare void @free(ptr)\ndeclare i32 @{_YIELD}()\n"
    # Otherwise LLVM halves 512-bit vectors on processors for which it prefers 256 bits.
    attributes = f'attributes #0 = {{ "min-legal-vector-width"="{32 * vectors.lanes}" }}\n'
    handler = _handler(record, sizes, plan, has_end, vectors.pause)
    return "".join([outside, declarations(vectors), *functions, _worker(), _forget(), handler, attributes])


def _worker() -> str:
    """Return ``worker(record)``, which takes pieces until none is left; the last user frees the record."""
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
    """Return ``handler(call)``; ``pause`` is a waiting thread's pause instruction."""
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
    # On an error, the number stays at the one thread stored before.
    error = code.value(f"call ptr {code.load_at('ptr', interface, _NUM_THREADS)}(ptr {request})")
    code.value(f"call i64 @forget(ptr {interface}, ptr {error})")
    available = code.load("i64", threads)
    pointers, numbers, pieces, weights = plan(code, arguments, results, available)
    users = code.smaller(code.smaller(available, pieces), code.ceiling(weights, _WEIGHTS_PER_THREAD))
    # The calling thread takes part even if there is nothing to do.
    users = code.larger(users, 1)

    record = code.value(f"call ptr @malloc(i64 {record_of.size})")
    record_of.write(code, record, pointers, numbers)
    # The calling thread uses the record once more than the others, to see when all is done.
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
    _await(code, done, pieces, pause, "")
    if has_end:
        code.effect(f"call void @end(ptr {record})")
    _release(code, record, users_left, "ptr null")
    return code.text()


def wait_for(code: Code, record: str, pieces: str, pause: str, name: str) -> None:
    """Append a wait until that many pieces are done, in a piece that comes after them: threads take pieces in order."""
    _await(code, code.at("i64", record, _DONE), pieces, pause, f"_{name}")


def _await(code: Code, done: str, pieces: str, pause: str, name: str) -> None:
    code.effect(f"br label %before_wait{name}")
    code.start(f"before_wait{name}")
    code.effect(f"br label %wait{name}")
    code.start(f"wait{name}")
    rests = f"[ 0, %before_wait{name} ], [ %rested{name}, %rest{name} ], [ %rested{name}, %yield{name} ]"
    code.value(f"phi i64 {rests}", f"%rests{name}")
    finished = code.value(f"load atomic i64, ptr {done} acquire, align 8")
    code.branch(code.value(f"icmp slt i64 {finished}, {pieces}"), f"more{name}", f"waited{name}")
    code.start(f"more{name}")
    code.value(f"add i64 %rests{name}, 1", f"%rested{name}")
    code.branch(code.value(f"icmp slt i64 %rests{name}, {_RESTS}"), f"rest{name}", f"yield{name}")
    code.start(f"rest{name}")
    code.effect(f"call {pause}")
    code.effect(f"br label %wait{name}")
    code.start(f"yield{name}")
    code.value(f"call i32 @{_YIELD}()")
    code.effect(f"br label %wait{name}")
    code.start(f"waited{name}")


def _buffers(code: Code, places: str, count: int) -> list[Buffer]:
    buffers = [code.load_at("ptr", places, index) for index in range(count)]
    return [
        Buffer(*(code.load_at("ptr", buffer, word) for word in (_BUFFER_NUMBERS, _BUFFER_LENGTHS)))
        for buffer in buffers
    ]


def _release(code: Code, record: str, users: str, result: str = "void") -> None:
    """End a function: the thread stops using the record."""
    before = code.value(f"atomicrmw sub ptr {users}, i64 1 acq_rel")
    code.branch(code.value(f"icmp eq i64 {before}, 1"), "last", "out")
    code.start("last")
    code.effect(f"call void @free(ptr {record})")
    code.effect("br label %out")
    code.start("out")
    code.effect(f"ret {result}")
