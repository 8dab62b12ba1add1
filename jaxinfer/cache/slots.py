"""Reading, writing and moving slots of flat buffers ``[L, B, S, K*H]``."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int


def write_slots(
    buffer: Float[Array, "L B S KH"],
    layer: Int[Array, ""] | int,
    slots_BT: Int[Array, "B T"],
    rows_BTKH: Float[Array, "B T K H"],
) -> Float[Array, "L B S KH"]:
    """Write one layer's new rows in place; slots past the end are dropped, the others must differ within a row."""
    batch, num_tokens = slots_BT.shape
    rows = rows_BTKH.reshape(batch, num_tokens, -1).astype(buffer.dtype)
    return buffer.at[layer, jnp.arange(batch)[:, None], slots_BT].set(rows, mode="drop", unique_indices=True)


def move_slots(
    buffer: Float[Array, "L B S KH"], from_BM: Int[Array, "B M"], to_BM: Int[Array, "B M"]
) -> Float[Array, "L B S KH"]:
    """Copy slots of every layer; all are read before any is written."""
    # Layers are indexed like rows and slots: as a dimension that is moved whole, they would have the TPU compiler put
    # them inside the slots, and copy the whole cache into that order and back.
    layer_L11 = jnp.arange(buffer.shape[0])[:, None, None]
    row_1B1 = jnp.arange(from_BM.shape[0])[None, :, None]
    moved = buffer.at[layer_L11, row_1B1, from_BM[None]].get(mode="fill", fill_value=0)
    return buffer.at[layer_L11, row_1B1, to_BM[None]].set(moved, mode="drop", unique_indices=True)


def path_moves(path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> tuple[jax.Array, jax.Array]:
    """Return from and to which of the new tokens' places a path moves; past ``count_B`` nothing moves."""
    step_M = jnp.arange(path_BM.shape[1], dtype=path_BM.dtype)
    from_BM = jnp.where(step_M < count_B[:, None], path_BM, step_M)
    return from_BM, jnp.broadcast_to(step_M, path_BM.shape)
