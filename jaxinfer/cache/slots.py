"""Reads and moves slots of flat buffers ``[L, B, S, K*H]``."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int, Num
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows_in_bytes import holds_bytes

# A TPU tile holds 16 slots of 16-bit numbers. If a tile would stay half empty, the compiler puts layers inside slots.
_SLOT_TILE = 16


def slots_for(num_tokens: int) -> int:
    """Return ``num_tokens`` rounded up to whole tiles, so that a layer is contiguous in memory as it is read."""
    return -(-num_tokens // _SLOT_TILE) * _SLOT_TILE


def slots_in_tiles(num_slots: int, backend: Backend) -> int:
    """Return the slots of a cache for ``num_slots``: on a TPU, of rows in bytes, an odd number of tiles.

    Of an even number, programs lay such rows out in other tiles than the loops in them, and copy the cache.
    """
    if backend.platform != "tpu" or not holds_bytes(backend.cache_dtype):
        return num_slots
    tiles = slots_for(num_slots) // _SLOT_TILE
    return (tiles + 1 - tiles % 2) * _SLOT_TILE


def empty_buffers(shape: tuple[int, ...], backend: Backend, has_values: bool = True) -> tuple[Array, Array]:
    """Return zeros for keys and for values; these have no lanes where keys are values too."""
    return jnp.zeros(shape, backend.cache_dtype), jnp.zeros(
        shape if has_values else (*shape[:-1], 0), backend.cache_dtype
    )


def move_slots(
    buffer: Num[Array, "L B S KH"], from_BM: Int[Array, "B M"], to_BM: Int[Array, "B M"]
) -> Num[Array, "L B S KH"]:
    """Copy slots of every layer; all are read before any is written."""
    return put_slots(buffer, to_BM, read_slots(buffer, from_BM))


def put_slots(
    target: Num[Array, "L B S KH"], to_BM: Int[Array, "B M"], rows_LBMI: Num[Array, "L B M KH"]
) -> Num[Array, "L B S KH"]:
    """Set slots of every layer; those past the end are dropped."""
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    return _scatter(target, _in_each_layer(target, to_BM), rows_LBMI, numbers)


def read_slots(buffer: Num[Array, "L B S KH"], from_BM: Int[Array, "B M"]) -> Num[Array, "L B M KH"]:
    """Return slots of every layer; zeros for slots past the end."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(3,),
        collapsed_slice_dims=(2,),
        start_index_map=(2,),
        operand_batching_dims=(0, 1),
        start_indices_batching_dims=(0, 1),
    )
    places_LBM1, sizes = _in_each_layer(buffer, from_BM), (1, 1, 1, buffer.shape[3])
    return jax.lax.gather(buffer, places_LBM1, numbers, sizes, mode="fill", fill_value=0)


def _in_each_layer(buffer: jax.Array, slots_BM: jax.Array) -> jax.Array:
    # Layers are indexed like rows and slots. If they were a dimension that moves whole, the TPU compiler would put them
    # inside the slots, and copy the whole cache to that order and back.
    return jnp.broadcast_to(slots_BM[..., None], (buffer.shape[0], *slots_BM.shape, 1))


def _scatter(
    buffer: jax.Array, places: jax.Array, values: jax.Array, numbers: jax.lax.ScatterDimensionNumbers
) -> jax.Array:
    # Rows are batch dimensions, not indices: a device that holds some of the rows then knows that it needs no others.
    return jax.lax.scatter(buffer, places, values, numbers, mode="drop", unique_indices=True)


def path_moves(path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> tuple[jax.Array, jax.Array]:
    """Return the slots that a path moves from and to, among the new tokens; past ``count_B`` nothing moves."""
    step_M = jnp.arange(path_BM.shape[1], dtype=path_BM.dtype)
    from_BM = jnp.where(step_M < count_B[:, None], path_BM, step_M)
    return from_BM, jnp.broadcast_to(step_M, path_BM.shape)
