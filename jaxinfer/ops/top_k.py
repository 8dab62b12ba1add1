"""The largest of many values, for values split over devices and for long rows."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import DATA, Array, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import even_axis, rows_axis

# The values of a block, whose maxima are compared first; and how many blocks per requested value make this worthwhile.
# `jaxinfer bench acceptance --strategies medusa` measures other values.
_BLOCK = 64
_BLOCKS_PER_VALUE = 8


def top_k(
    values: Array, count: int, backend: Backend, axes: tuple[str | None, ...] = (DATA,)
) -> tuple[Array, Int[Array, "*rows count"]]:
    """Return the largest values along the last axis and their indices, the lowest index first among equals.

    ``axes`` name the mesh axis that splits each axis of the values, if it splits evenly; unnamed axes are not split.
    What ``data`` splits are rows, which another axis may split too (`rows_axis`). If the last axis is split, each
    device finds its own largest values and only these are gathered. The compiler would gather all values.
    """
    mesh = backend.mesh
    if mesh is None:
        by_blocks = backend.platform == "cpu" and values.shape[-1] >= _BLOCK * _BLOCKS_PER_VALUE * count
        best, places = _top_k_by_blocks(values, count) if by_blocks else lax.top_k(values, count)
        return best, places
    axes = axes + (None,) * (values.ndim - len(axes))
    split = [
        rows_axis(size, backend) if axis == DATA else axis and even_axis(axis, size, backend)
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


def _top_k_by_blocks(values: Array, count: int) -> tuple[Array, Array]:
    """Return what `lax.top_k` does, which is several times slower for long rows on a CPU.

    In rows with NaN, or with zeros of both signs, the order may differ.

    The largest values are in the blocks with the largest maxima, of equal ones the first: each of these blocks has one
    value that comes before all values of any other block.
    """
    *lead, size = values.shape
    lowest = -jnp.inf if jnp.issubdtype(values.dtype, jnp.floating) else jnp.iinfo(values.dtype).min
    values = jnp.pad(values, [(0, 0)] * len(lead) + [(0, -size % _BLOCK)], constant_values=lowest)
    blocks = values.reshape(*lead, -1, _BLOCK)
    # Sorted by place, so that the lowest index still comes first among equals.
    chosen = jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), count)[1], axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[..., None], axis=-2).reshape(*lead, -1)
    best, among = lax.top_k(candidates, count)
    return best, jnp.take_along_axis(chosen, among // _BLOCK, axis=-1) * _BLOCK + among % _BLOCK
