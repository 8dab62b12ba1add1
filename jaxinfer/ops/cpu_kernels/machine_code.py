"""Compiles assembly for this machine's processor and registers it with XLA."""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.ops.cpu_kernels.tiles import Vectors, describe_vectors

# An engine keeps its compiled code in memory.
_ENGINES: dict[str, Any] = {}
_COMPILING = threading.Lock()


@functools.cache
def host_vectors() -> Vectors | None:
    """Return this processor's vectors; None if LLVM is not installed or does not know the processor."""
    # Imported here: machines with other devices do not need LLVM.
    try:
        from llvmlite import binding as llvm
    except (ImportError, OSError):
        return None
    return describe_vectors(llvm.get_process_triple(), llvm.get_host_cpu_features())


def call(
    name: str, build: Callable[[Vectors], str], dtype: str, numbers: int, results: Any, *operands: jax.Array
) -> Any:
    """Make XLA call the module from ``build``, compiled for this processor at first use.

    ``numbers`` and ``dtype`` are the length and the dtype of its dot products, if it has any.
    """
    vectors = host_vectors()
    assert vectors is not None
    vectors = vectors.for_rows_of(numbers)
    pairs = "_pairs" if vectors.pairs(dtype) else ""
    target = f"jaxinfer_{name}_{dtype}_{vectors.lanes}x{vectors.rows}{pairs}"
    with _COMPILING:
        if target not in _ENGINES:
            _register(target, build(vectors))
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands)


def _register(target: str, assembly: str) -> None:
    """Compile a module and register its ``handler`` as XLA's foreign function ``target``."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    module = llvm.parse_assembly(assembly)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    handler = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    _ENGINES[target] = engine
