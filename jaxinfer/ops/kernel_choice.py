"""Decides whether a TPU kernel serves an operation on a cache, and runs it on every device of a mesh."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.notation import DATA, TENSOR
from jaxinfer.ops.backend import Backend

# A TPU's lanes. A cache whose width is no multiple of them has another layout and would be copied for a kernel.
_LANES = 128


def choose_means(backend: Backend, keys_LBSF: Any) -> Literal["kernel", "reference", "xla"]:
    """Return the means for this cache: XLA if neither the kernels nor the reference support it."""
    if backend.kernels == "xla" or keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32):
        return "xla"
    if backend.kernels == "reference":
        return "reference"
    lies_well = keys_LBSF.shape[-1] // backend.kv_shards % _LANES == 0
    return "kernel" if lies_well or backend.kernels == "interpret" else "xla"


def on_each_device(function: Callable[..., Any], backend: Backend, layouts: str, results: str) -> Callable[..., Any]:
    """Return ``function`` so that each device runs it on its heads and rows; unchanged if there is one device.

    One letter per argument, or result, gives its layout: ``h`` is ``[B, T, N, H]``, split by heads; ``f`` is ``[B, T,
    F]`` and ``c`` the cache ``[L, B, S, F]``, split by lanes; ``r`` is split by rows; ``a`` is the same on all devices.
    Rows that do not split evenly are on every device.
    """
    mesh = backend.mesh
    if mesh is None:
        return function

    def run(*arguments: Any) -> Any:
        num_rows = arguments[layouts.index("c")].shape[1]
        rows = DATA if num_rows % mesh.shape[DATA] == 0 else None
        specs = {
            "h": PartitionSpec(rows, None, TENSOR, None),
            "f": PartitionSpec(rows, None, TENSOR),
            "c": PartitionSpec(None, rows, None, TENSOR),
            "r": PartitionSpec(rows),
            "a": PartitionSpec(),
        }
        given = tuple(specs[letter] for letter in layouts)
        returned = tuple(specs[letter] for letter in results)
        return backend.on_devices(function, given, returned if len(results) > 1 else returned[0])(*arguments)

    return run
