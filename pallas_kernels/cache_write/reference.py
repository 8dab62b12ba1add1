"""The reference of cache_write, in plain JAX."""

import jax
import jax.numpy as jnp


def reference_write(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    count_B: jax.Array | None = None,
    *,
    num_sinks: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write token i of row b to the slot of position ``start_B[b] + i``, except past the end and past the count.

    A position p is slot p; in a ring after ``num_sinks`` sinks, positions from there on are ``num_sinks + (p -
    num_sinks) % C``.
    """
    batch, tokens = new_keys_BTF.shape[:2]
    num_slots = keys_LBSF.shape[2]
    index_T = jnp.arange(tokens)
    slot_BT = start_B[:, None] + index_T
    if num_sinks is not None:
        around_BT = num_sinks + (slot_BT - num_sinks) % (num_slots - num_sinks)
        slot_BT = jnp.where(slot_BT < num_sinks, slot_BT, around_BT)
    if count_B is not None:
        slot_BT = jnp.where(index_T < count_B[:, None], slot_BT, num_slots)
    rows_B1 = jnp.arange(batch)[:, None]

    def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[layer, rows_B1, slot_BT].set(new.astype(buffer.dtype), mode="drop", unique_indices=True)

    return write(keys_LBSF, new_keys_BTF), write(values_LBSF, new_values_BTF)
