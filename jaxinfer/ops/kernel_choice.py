"""When a TPU kernel serves an operation on a cache, and how it runs on every device of a mesh."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.ops.backend import Backend

# What a TPU holds side by side. A cache of another width lies in another order, and would be copied for a kernel.
_LANES = 128


def choose_means(backend: Backend, keys_LBSF: Any) -> Literal["kernel", "reference", "xla"]:
    """Return by what a backend works on this cache: by XLA where kernels or the reference do not serve it.

    On several devices, kernels serve where the context has the mesh: elsewhere only shapes are asked for.
    """
    if backend.kernels == "xla" or keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32):
        return "xla"
    if backend.kernels == "reference":
        return "reference"
    if backend.kv_shards > 1 and backend.kv_axis not in jax.sharding.get_abstract_mesh().axis_names:
        return "xla"
    lies_well = keys_LBSF.shape[-1] // backend.kv_shards % _LANES == 0
    return "kernel" if lies_well or backend.kernels == "interpret" else "xla"


def on_each_device(function: Callable[..., Any], backend: Backend, layouts: str, results: str) -> Callable[..., Any]:
    """Return ``function`` as each device runs it on its own heads and rows; it is given back where there is one device.

    A letter an argument, or result, says how that lies: ``h`` is ``[B, T, N, H]``, split by heads; ``f`` ``[B, T, F]``
    and ``c`` the cache ``[L, B, S, F]``, by lanes; ``r`` has a row for each of the batch, ``a`` is the same everywhere.
    The mesh is that of the context (`jax.set_mesh`), its axes named by the backend.
    """
    if backend.kv_axis is None or backend.kv_axis not in jax.sharding.get_abstract_mesh().axis_names:
        return function
    heads, rows = backend.kv_axis, backend.batch_axis
    specs = {
        "h": PartitionSpec(rows, None, heads, None),
        "f": PartitionSpec(rows, None, heads),
        "c": PartitionSpec(None, rows, None, heads),
        "r": PartitionSpec(rows),
        "a": PartitionSpec(),
    }
    given = tuple(specs[letter] for letter in layouts)
    returned = tuple(specs[letter] for letter in results)
    # What a kernel returns does not say on which axes it varies.
    return jax.shard_map(
        function, in_specs=given, out_specs=returned if len(results) > 1 else returned[0], check_vma=False
    )
