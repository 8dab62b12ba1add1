"""Compiles assembly for this machine's processor and registers it with XLA."""

import ctypes
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.ops.cpu_kernels.processor import host_features
from jaxinfer.ops.cpu_kernels.tiles import Vectors, describe_vectors

# Compiled code is in memory for as long as its engine is. The objects are what its engine was given of it.
_ENGINES: dict[str, Any] = {}
_OBJECTS: dict[str, bytes] = {}
_COMPILING = threading.Lock()
# What is part of the names of functions that use a matrix unit.
IN_TILES = "_in_tiles"
# Linux on x86-64: a system call, and what it is asked for.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def host_vectors() -> Vectors | None:
    """Return this processor's vectors; None if LLVM is not installed or does not know the processor."""
    # Imported here: machines with other devices do not need LLVM.
    try:
        from llvmlite import binding as llvm
    except (ImportError, OSError):
        return None
    vectors = describe_vectors(llvm.get_process_triple(), host_features())
    if vectors is not None and vectors.tiles_bfloat16 and not _may_use_tiles():
        return replace(vectors, tiles_bfloat16=False)
    return vectors


def _may_use_tiles() -> bool:
    """Ask Linux for the matrix unit's registers; a process and its children have them from then on."""
    if sys.platform != "linux":
        return False
    numbers = map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    return ctypes.CDLL(None).syscall(*numbers) == 0


def call(name: str, build: Callable[[Vectors], str], dtype: str, results: Any, *operands: jax.Array) -> Any:
    """Make XLA call the module from ``build``, compiled for this processor at first use.

    ``dtype`` is that of its dot products, if it has any.
    """
    vectors = host_vectors()
    assert vectors is not None
    pairs = "_pairs" if vectors.pairs(dtype) else ""
    target = f"jaxinfer_{name}_{dtype}_{vectors.lanes}x{vectors.rows}{pairs}_{_source_digest()}"
    with _COMPILING:
        if target not in _ENGINES:
            _register(target, build(vectors))
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands)


@functools.cache
def _source_digest() -> str:
    """Return letters that stand for the source of all kernels.

    A name is all that a compiled program, kept for other processes, knows of the kernels that it calls.
    """
    ops = Path(__file__).parents[1]
    files = sorted([*ops.glob("cpu_kernels/**/*.py"), ops / "few_bits" / "formats.py"])
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()[:8]


def compiled_objects() -> dict[str, bytes]:
    """Return the compiled code of all functions that XLA knows by now, by their names."""
    with _COMPILING:
        return dict(_OBJECTS)


def load_objects(objects: Mapping[str, bytes]) -> None:
    """Have XLA know functions that a process on this processor compiled: what `compiled_objects` gave there.

    Raises:
        ValueError: This process has no matrix unit, and that one had.
    """
    vectors = host_vectors()
    has_tiles = vectors is not None and vectors.tiles_bfloat16
    if not has_tiles and any(IN_TILES in target for target in objects):
        raise ValueError("no matrix unit for what was compiled")
    with _COMPILING:
        for target, content in objects.items():
            if target not in _ENGINES:
                _load(target, content)


def _register(target: str, assembly: str) -> None:
    """Compile a module and register its ``handler`` as XLA's foreign function ``target``."""
    from llvmlite import binding as llvm

    module = llvm.parse_assembly(assembly)
    module.verify()
    _load(target, _machine().emit_object(module))


def _load(target: str, content: bytes) -> None:
    from llvmlite import binding as llvm

    machine = _machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(content))
    engine.finalize_object()
    handler = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    _ENGINES[target], _OBJECTS[target] = engine, content


def _machine() -> Any:
    """Return LLVM's compiler for this processor."""
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features().flatten(), opt=3, jit=True
    )
