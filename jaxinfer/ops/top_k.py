"""The best of many values, where devices hold parts of them."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import DATA, Array, Int
from jaxinfer.ops.backend import Backend


def top_k(
    values: Array, count: int, backend: Backend, axes: tuple[str | None, ...] = (DATA,)
) -> tuple[Array, Int[Array, "*rows count"]]:
    """Return the greatest values along the last axis and their places, the lowest place first among equals.

    ``axes`` name the mesh axis that each axis of the values is split over, as far as it splits evenly; those not named
    are not split. Where the last is, every device finds its own best, and only these are gathered: the compiler itself
    would gather all values.
    """
    mesh = backend.mesh
    if mesh is None:
        best, places = lax.top_k(values, count)
        return best, places
    axes = axes + (None,) * (values.ndim - len(axes))
    split = [
        axis if axis and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, values.shape)
    ]
    *rows, last = split

    def best_of_shard(values: Array) -> tuple[Array, Array]:
        size = values.shape[-1]
        best, places = lax.top_k(values, min(count, size))
        if last is None:
            return best, places
        places = places + lax.axis_index(last).astype(places.dtype) * size
        best, places = (lax.all_gather(part, last, axis=best.ndim - 1, tiled=True) for part in (best, places))
        best, chosen = lax.top_k(best, count)
        return best, jnp.take_along_axis(places, chosen, axis=-1)

    whole = PartitionSpec(*rows, None)
    return backend.on_devices(best_of_shard, PartitionSpec(*split), (whole, whole))(values)
