"""Writes and moves slots of pools of pages ``[L, P, Z, F]``, in place; numbers past the last page are dropped.

The pool keeps its shape throughout: in a loop, XLA's CPU backend copies a pool that is reshaped for a write.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int, Num

Places = tuple[Int[Array, "B T"], Int[Array, "B T"]]


def write_in_pages(
    pool_LPZF: Num[Array, "L P Z F"],
    layer: Int[Array, ""] | int,
    pages_BT: Int[Array, "B T"],
    slots_BT: Int[Array, "B T"],
    rows_BTF: Num[Array, "B T F"],
) -> Num[Array, "L P Z F"]:
    """Set slots of one layer's pages; those that are not dropped must differ."""
    layer_BT = jnp.broadcast_to(layer, pages_BT.shape).astype(pages_BT.dtype)
    places_BT3 = jnp.stack([layer_BT, pages_BT, slots_BT], axis=-1)
    numbers = jax.lax.ScatterDimensionNumbers((2,), (0, 1, 2), (0, 1, 2))
    return jax.lax.scatter(pool_LPZF, places_BT3, rows_BTF, numbers, mode="drop", unique_indices=True)


def move_in_pages(pool_LPZF: Num[Array, "L P Z F"], moved_from: Places, moved_to: Places) -> Num[Array, "L P Z F"]:
    """Copy slots of every layer's pages; all are read before any is written."""
    numbers = jax.lax.GatherDimensionNumbers((3,), (0, 1, 2), (0, 1, 2))
    places, sizes = _in_each_layer(pool_LPZF, moved_from), (1, 1, 1, pool_LPZF.shape[3])
    rows_LBTF = jax.lax.gather(pool_LPZF, places, numbers, sizes, mode="fill", fill_value=0)
    scattered = jax.lax.ScatterDimensionNumbers((3,), (0, 1, 2), (0, 1, 2))
    places = _in_each_layer(pool_LPZF, moved_to)
    return jax.lax.scatter(pool_LPZF, places, rows_LBTF, scattered, mode="drop", unique_indices=True)


def _in_each_layer(pool_LPZF: jax.Array, places: Any) -> jax.Array:
    """Return the places ``[L, B, T, 3]`` of all layers, which are indexed as pages are: see `jaxinfer.cache.slots`."""
    shape = (pool_LPZF.shape[0], *places[0].shape)
    layers = jnp.arange(shape[0], dtype=places[0].dtype)[:, None, None]
    return jnp.stack([jnp.broadcast_to(each, shape) for each in (layers, *places)], axis=-1)
