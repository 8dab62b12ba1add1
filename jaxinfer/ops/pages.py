"""Writes and moves slots of pools of pages ``[L, P, Z, F]``, in place; numbers past the last page are dropped.

The pool keeps its shape throughout: in a loop, XLA's CPU backend copies a pool that is reshaped for a write.

On a TPU, kernels and scatters want pages in bytes in different tiles, and a pool would be copied between them in every
layer. So these are written one after another, which takes a scatter as long: as single slots where the compiler keeps
the tiles of a pool for those (libtpu of JAX 0.10), and as whole tiles where it keeps them for these (of JAX 0.12).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int, Num

# The slots of a tile of bytes in a TPU's memory, or one: what is written at once.
_TILE = 32 if jax.__version_info__ >= (0, 11) else 1

Places = tuple[Int[Array, "B T"], Int[Array, "B T"]]


def write_in_pages(
    pool_LPZF: Num[Array, "L P Z F"],
    layer: Int[Array, ""] | int,
    pages_BT: Int[Array, "B T"],
    slots_BT: Int[Array, "B T"],
    rows_BTF: Num[Array, "B T F"],
) -> Num[Array, "L P Z F"]:
    """Set slots of one layer's pages; those that are not dropped must differ.

    Where pages are in bytes, page 0 may be written instead of nothing. A pool without lanes stays as it is.
    """
    if not pool_LPZF.shape[3]:
        return pool_LPZF
    if pool_LPZF.dtype.itemsize == 1:
        operands = pool_LPZF, jnp.asarray(layer), pages_BT, slots_BT, rows_BTF
        return jax.lax.platform_dependent(*operands, tpu=write_one_by_one, default=_write_by_scatter)
    return _write_by_scatter(pool_LPZF, layer, pages_BT, slots_BT, rows_BTF)


def _write_by_scatter(pool_LPZF: Any, layer: Any, pages_BT: Any, slots_BT: Any, rows_BTF: Any) -> Any:
    layer_BT = jnp.broadcast_to(layer, pages_BT.shape).astype(pages_BT.dtype)
    places_BT3 = jnp.stack([layer_BT, pages_BT, slots_BT], axis=-1)
    numbers = jax.lax.ScatterDimensionNumbers((2,), (0, 1, 2), (0, 1, 2))
    return jax.lax.scatter(pool_LPZF, places_BT3, rows_BTF, numbers, mode="drop", unique_indices=True)


def move_in_pages(pool_LPZF: Num[Array, "L P Z F"], moved_from: Places, moved_to: Places) -> Num[Array, "L P Z F"]:
    """Copy slots of every layer's pages; all are read before any is written."""
    if not pool_LPZF.shape[3]:
        return pool_LPZF
    if pool_LPZF.dtype.itemsize == 1:
        operands = pool_LPZF, moved_from, moved_to
        return jax.lax.platform_dependent(*operands, tpu=move_one_by_one, default=_move_by_scatter)
    return _move_by_scatter(pool_LPZF, moved_from, moved_to)


def read_in_pages(pool_LPZF: Num[Array, "L P Z F"], places: Places) -> Num[Array, "L B T F"]:
    """Return slots of every layer's pages; zeros for those past the last page."""
    numbers = jax.lax.GatherDimensionNumbers((3,), (0, 1, 2), (0, 1, 2))
    places_LBT3, sizes = _in_each_layer(pool_LPZF, places), (1, 1, 1, pool_LPZF.shape[3])
    return jax.lax.gather(pool_LPZF, places_LBT3, numbers, sizes, mode="fill", fill_value=0)


def _move_by_scatter(pool_LPZF: Any, moved_from: Places, moved_to: Places) -> Any:
    rows_LBTF = read_in_pages(pool_LPZF, moved_from)
    scattered = jax.lax.ScatterDimensionNumbers((3,), (0, 1, 2), (0, 1, 2))
    places = _in_each_layer(pool_LPZF, moved_to)
    return jax.lax.scatter(pool_LPZF, places, rows_LBTF, scattered, mode="drop", unique_indices=True)


def copy_pages(
    pool_LPZF: Num[Array, "L P Z F"], from_X: Int[Array, " X"], to_X: Int[Array, " X"]
) -> Num[Array, "L P Z F"]:
    """Copy pages of every layer, in as much more memory as one layer's take; all are read before any is written."""

    def copy_in_layer(layer: Any, pool_LPZF: Any) -> Any:
        pages_XZF = pool_LPZF.at[layer, from_X].get(mode="clip")
        return pool_LPZF.at[layer, to_X].set(pages_XZF, mode="drop")

    return jax.lax.fori_loop(0, pool_LPZF.shape[0], copy_in_layer, pool_LPZF) if pool_LPZF.shape[3] else pool_LPZF


def write_one_by_one(
    pool_LPZF: Any, layer: Any, pages_BT: Any, slots_BT: Any, rows_BTF: Any, *, tile: int = _TILE
) -> Any:
    """Do what `write_in_pages` does, ``tile`` slots for each that is new; what is dropped is written to page 0."""
    (pages_X, slots_X), layer = _listed(pool_LPZF, (pages_BT, slots_BT)), jnp.asarray(layer, jnp.int32)
    rows_XF, zero = rows_BTF.reshape(-1, rows_BTF.shape[2]), jnp.int32(0)
    tile = min(tile, pool_LPZF.shape[2])

    def write(index: Any, pool_LPZF: Any) -> Any:
        slot, rows_ZF = slots_X[index], rows_XF[index][None]
        place = layer, pages_X[index], slot // tile * tile, zero
        if tile > 1:
            held_11ZF = jax.lax.dynamic_slice(pool_LPZF, place, (1, 1, tile, pool_LPZF.shape[3]))
            is_new_Z1 = (jnp.arange(tile, dtype=jnp.int32) == slot % tile)[:, None]
            rows_ZF = jnp.where(is_new_Z1, rows_ZF, held_11ZF[0, 0])
        return jax.lax.dynamic_update_slice(pool_LPZF, rows_ZF[None, None], place)

    return jax.lax.fori_loop(0, rows_XF.shape[0], write, pool_LPZF)


def move_one_by_one(pool_LPZF: Any, moved_from: Places, moved_to: Places) -> Any:
    """Do what `move_in_pages` does, slot by slot; what is dropped is written to page 0."""
    zero, of_slot = jnp.int32(0), (pool_LPZF.shape[0], 1, 1, pool_LPZF.shape[3])

    def start(places: Any, index: Any) -> Any:
        return zero, *(each[index] for each in places), zero

    def read(index: Any) -> Any:
        return jax.lax.dynamic_slice(pool_LPZF, start(sources, index), of_slot)

    def write(index: Any, pool_LPZF: Any) -> Any:
        return jax.lax.dynamic_update_slice(pool_LPZF, rows_XL11F[index], start(targets, index))

    sources, targets = _listed(pool_LPZF, moved_from), _listed(pool_LPZF, moved_to)
    rows_XL11F = jax.lax.map(read, jnp.arange(sources[0].shape[0]))
    return jax.lax.fori_loop(0, targets[0].shape[0], write, pool_LPZF)


def _listed(pool_LPZF: Any, places: Places) -> tuple[Any, Any]:
    """Return the pages and slots one after another; page 0 for pages past the last one."""
    pages_X, slots_X = (each.reshape(-1).astype(jnp.int32) for each in places)
    return jnp.where(pages_X < pool_LPZF.shape[1], pages_X, 0), slots_X


def _in_each_layer(pool_LPZF: jax.Array, places: Any) -> jax.Array:
    """Return the places ``[L, B, T, 3]`` of all layers, which are indexed as pages are: see `jaxinfer.cache.slots`."""
    shape = (pool_LPZF.shape[0], *places[0].shape)
    layers = jnp.arange(shape[0], dtype=places[0].dtype)[:, None, None]
    return jnp.stack([jnp.broadcast_to(each, shape) for each in (layers, *places)], axis=-1)
