"""Compiling assembly for the processor at hand, and naming the result to XLA."""

import ctypes
import functools
from typing import Any

import jax

from jaxinfer.ops.cpu_kernels.tiles import Vectors, describe_vectors

# Compiled code is in memory for as long as its engine is.
_ENGINES: dict[str, Any] = {}


@functools.cache
def host_vectors() -> Vectors | None:
    """Return what this machine's processor offers; None where LLVM is not installed, or does not know it."""
    # Imported here: machines with other devices need not wait for it.
    try:
        from llvmlite import binding as llvm
    except (ImportError, OSError):
        return None
    return describe_vectors(llvm.get_process_triple(), llvm.get_host_cpu_features())


def register(name: str, assembly: str) -> None:
    """Compile a module, and have XLA's foreign function ``name`` call its ``handler``."""
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
    _ENGINES[name] = engine
    handler = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
