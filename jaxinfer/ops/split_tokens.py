"""How a prompt's tokens are split over devices, inside and between the regions that split heads or features.

Inside a region, all devices of the axis ``tensor`` have the same tokens and parts of the weights. Between regions,
where tokens are independent (norms and the residual stream), each device has its own tokens. The sum at a region's end
is a reduce-scatter, and the next region starts with an all-gather (Korthikanti et al., 2205.05198). This sends as much
as an all-reduce and holds less.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxinfer.notation import SEQUENCE, TENSOR, Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import rows_axis


def enter_region(hidden_BTD: Float[Array, "B T D"], seen: Any, backend: Backend) -> Float[Array, "B T D"]:
    """Gather a prompt's tokens, split between regions, on all devices that split weights."""
    return _split(hidden_BTD, seen, backend, (SEQUENCE,))


def leave_region(hidden_BTD: Float[Array, "B T D"], seen: Any, backend: Backend) -> Float[Array, "B T D"]:
    """Split a prompt's tokens over all devices that have the same weights, or parts of them."""
    return _split(hidden_BTD, seen, backend, (SEQUENCE, TENSOR) if backend.splits_activations else (SEQUENCE,))


def gather_tokens(heads_BTKH: Float[Array, "B T K H"], seen: Any, backend: Backend) -> Float[Array, "B T K H"]:
    """Gather a prompt's keys or values on all devices that split its tokens."""
    if not _is_split_prompt(seen, backend):
        return heads_BTKH
    return backend.constrained(heads_BTKH, PartitionSpec(rows_axis(heads_BTKH.shape[0], backend), None, TENSOR, None))


def _split(hidden_BTD: jax.Array, seen: Any, backend: Backend, axes: tuple[str, ...]) -> jax.Array:
    """Split a prompt's tokens over those axes that divide them evenly; a step's tokens are not split."""
    mesh = backend.mesh
    if mesh is None or not _is_split_prompt(seen, backend):
        return hidden_BTD
    over, parts = [], 1
    for axis in axes:
        if hidden_BTD.shape[1] % (parts * mesh.shape[axis]) == 0:
            over.append(axis)
            parts *= mesh.shape[axis]
    rows = rows_axis(hidden_BTD.shape[0], backend)
    return backend.constrained(hidden_BTD, PartitionSpec(rows, tuple(over), None))


def _is_split_prompt(seen: Any, backend: Backend) -> bool:
    is_prompt = seen is not None and seen.counts_B is not None
    return is_prompt and backend.mesh is not None and (backend.slot_shards > 1 or backend.splits_activations)
