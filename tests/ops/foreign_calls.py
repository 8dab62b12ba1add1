"""XLA's side of the CPU's own kernels, played by a test; and what the tests of these kernels share."""

import ctypes
import hashlib
import itertools
import mmap
import threading
from dataclasses import replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import binding as llvm

from jaxinfer.ops.cpu_kernels import machine_code
from jaxinfer.ops.cpu_kernels.few_bits.product_code import row_dtype

HOST = machine_code.host_vectors()
assert HOST is not None, "the tests need llvmlite"
# Processors whose instructions run on this one too: half and quarter vectors, and bfloat16 without products of pairs.
_WITHOUT = {"pairs_bfloat16": False, "tiles_bfloat16": False, "dtypes": ("float32", "bfloat16")}
_PICKS_BY = "avx2" if HOST.picks_by == "avx512" else HOST.picks_by
SMALLER = tuple(
    replace(HOST, lanes=lanes, rows=rows, picks_by=_PICKS_BY, **_WITHOUT) for lanes, rows in ((8, 3), (4, 2), (4, 6))
)
POOLS = pytest.mark.parametrize("pool", ["is missing", "refuses", "runs at once", "is late", "has threads"])


def drawn(rng, shape, dtype="float32"):
    """Return NumPy's array: what is done to it before a call compiles nothing."""
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def beside_a_guard(array, at_end):
    """Return a copy of an array at the end, or the beginning, of memory; what lies past that cannot be read."""
    page = mmap.PAGESIZE
    pages = -(-array.nbytes // page) + 1
    memory = mmap.mmap(-1, pages * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = start + (pages - 1) * page if at_end else start
    assert _LIBRARY.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    place = (pages - 1) * page - array.nbytes if at_end else page
    copy = np.frombuffer(memory, array.dtype, array.size, place).reshape(array.shape)
    copy[...] = array
    return copy


def exact(array):
    return np.asarray(array, np.float64)


_LIBRARY = ctypes.CDLL(None)
_LIBRARY.malloc.restype, _LIBRARY.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_LIBRARY.free.argtypes = [ctypes.c_void_p]


def check_products(found, rows_MK, weights):
    """Compare products of rows with weights, given in float64, with NumPy's."""
    expected, size = exact(rows_MK) @ weights.T, np.abs(exact(rows_MK)) @ np.abs(weights).T
    assert (np.abs(found - expected) <= 2e-6 * size).all()


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
def _allocate(size):
    record = _LIBRARY.malloc(size)
    Calls.records.add(record)
    return record


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _free(record):
    Calls.records.remove(record)
    _LIBRARY.free(record)


# By digests: texts and modules in LLVM's own form are many times as large as their code.
_ENGINES = {}


def _engine(assembly):
    """Compile a module, once for all that call it, and have it count what it allocates."""
    own = hashlib.sha256(assembly.encode()).digest()
    if own not in _ENGINES:
        _ENGINES[own] = _compiled(assembly)
    return _ENGINES[own]


def _compiled(assembly):
    for name, function in (("test_malloc", _allocate), ("test_free", _free)):
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    made_for = {"cpu": llvm.get_host_cpu_name(), "features": features, "jit": True}
    assembly = assembly.replace("@malloc", "@test_malloc").replace("@free", "@test_free")
    code = target.create_target_machine(**made_for).emit_object(llvm.parse_assembly(assembly))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.create_target_machine(**made_for))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


class Calls:
    """XLA's side of a handler: its interface, whose pool answers as told, and a count of what is allocated."""

    records: ClassVar[set[int]] = set()

    def __init__(self, assembly, pool="runs at once", threads=5):
        self.pool, self.threads = pool, threads
        self.errors, self.late, self.running = 0, [], []

        def schedule(request):
            if self.pool == "refuses":
                return self.error()
            task, record = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(request[3]), request[4]
            if self.pool == "runs at once":
                task(record)
            elif self.pool == "is late":
                self.late.append((task, record))
            else:
                self.running.append(threading.Thread(target=task, args=(record,)))
                self.running[-1].start()
            return None

        def count(request):
            if self.pool == "is missing":
                return self.error()
            ctypes.c_int64.from_address(request[3]).value = self.threads
            return None

        def destroy(request):
            assert request[2] == 0xBAD
            self.errors -= 1

        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
        self.kept = [function(each) for each in (destroy, schedule, count)]
        self.interface = (ctypes.c_int64 * 24)()
        for word, each in zip((8, 17, 18), self.kept):
            self.interface[word] = ctypes.cast(each, ctypes.c_void_p).value
        self.handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(
            _engine(assembly).get_function_address("handler")
        )

    def products(self, vectors, rows_MK, matrices):
        """Return the products of rows with matrices in few bits."""
        form = matrices[0].form
        dtype = vectors.row_dtype("bfloat16") if form.kept is not None else row_dtype(vectors, form)
        rows_MK = rows_MK.astype(jnp.dtype(dtype))
        operands = [part for matrix in matrices for part in matrix.matrix]
        return self.call([rows_MK, *operands], [(len(rows_MK), each.shape[0]) for each in matrices])

    def error(self):
        self.errors += 1
        return 0xBAD

    def call(self, arguments, shapes, dtypes=None):
        """Call the handler; results of these shapes hold NaN before, or 99 if they are integers."""
        arguments = [np.ascontiguousarray(array) for array in arguments]
        results = [np.full(shape, 99 if dtype in (np.int8, np.int32) else np.nan, dtype)
                   for shape, dtype in zip(shapes, dtypes or itertools.repeat(np.float32))]  # fmt: skip
        arrays = [*arguments, *results]
        lengths = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
        buffers = [
            (ctypes.c_int64 * 6)(48, 0, 0, array.ctypes.data, array.ndim, ctypes.addressof(length))
            for array, length in zip(arrays, lengths)
        ]
        places = [ctypes.addressof(buffer) for buffer in buffers]
        operands = (ctypes.c_int64 * len(arguments))(*places[: len(arguments)])
        found = (ctypes.c_int64 * len(results))(*places[len(arguments) :])
        frame = (ctypes.c_int64 * 24)()
        frame[2], frame[9], frame[14] = (ctypes.addressof(each) for each in (self.interface, operands, found))
        assert self.handler(ctypes.addressof(frame)) is None
        return results

    def finish(self):
        """Run what the pool still has, and see that nothing is left behind."""
        for task, record in self.late:
            task(record)
        for thread in self.running:
            thread.join()
        assert self.errors == 0
        assert not self.records
        assert (len(self.late) > 0) == (self.pool == "is late")
        assert (len(self.running) > 0) == (self.pool == "has threads")
