"""Reading and moving slots of flat buffers ``[L, B, S, K*H]``."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int

# A TPU lays out 16 slots of 16-bit numbers in a tile; where one would stay half empty, it puts layers inside slots.
_SLOT_TILE = 16


def slots_for(num_tokens: int) -> int:
    """Return the number of slots, a little more than tokens, that lie in memory as a layer is read."""
    return -(-num_tokens // _SLOT_TILE) * _SLOT_TILE


def move_slots(
    buffer: Float[Array, "L B S KH"], from_BM: Int[Array, "B M"], to_BM: Int[Array, "B M"]
) -> Float[Array, "L B S KH"]:
    """Copy slots of every layer; all are read before any is written."""
    return copy_slots(buffer, to_BM, buffer, from_BM)


def copy_slots(
    target: Float[Array, "L B S KH"],
    to_BM: Int[Array, "B M"],
    source: Float[Array, "L B C KH"],
    from_BM: Int[Array, "B M"],
) -> Float[Array, "L B S KH"]:
    """Copy slots of every layer from one buffer to another; slots past the target's end are dropped."""
    copied_LBMI = read_slots(source, from_BM)
    layer_L11, row_1B1 = _layers_and_rows(target)
    return target.at[layer_L11, row_1B1, to_BM[None]].set(copied_LBMI, mode="drop", unique_indices=True)


def read_slots(buffer: Float[Array, "L B S KH"], from_BM: Int[Array, "B M"]) -> Float[Array, "L B M KH"]:
    """Return slots of every layer; zeros for slots past the end."""
    layer_L11, row_1B1 = _layers_and_rows(buffer)
    return buffer.at[layer_L11, row_1B1, from_BM[None]].get(mode="fill", fill_value=0)


def _layers_and_rows(buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Layers are indexed like rows and slots: as a dimension that is moved whole, they would have the TPU compiler put
    # them inside the slots, and copy the whole cache into that order and back.
    return jnp.arange(buffer.shape[0])[:, None, None], jnp.arange(buffer.shape[1])[None, :, None]


def path_moves(path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> tuple[jax.Array, jax.Array]:
    """Return from and to which of the new tokens' places a path moves; past ``count_B`` nothing moves."""
    step_M = jnp.arange(path_BM.shape[1], dtype=path_BM.dtype)
    from_BM = jnp.where(step_M < count_B[:, None], path_BM, step_M)
    return from_BM, jnp.broadcast_to(step_M, path_BM.shape)
