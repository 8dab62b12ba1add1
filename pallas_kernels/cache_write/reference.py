"""What cache_write computes, in plain JAX."""

import jax
import jax.numpy as jnp


def reference_write(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write token i of row b to slot ``start_B[b] + i`` of ``cache[layer]``; those past the end are dropped."""
    batch, tokens = new_keys_BTF.shape[:2]
    slots_BT = start_B[:, None] + jnp.arange(tokens)
    rows_B1 = jnp.arange(batch)[:, None]

    def write(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return buffer.at[layer, rows_B1, slots_BT].set(new.astype(buffer.dtype), mode="drop", unique_indices=True)

    return write(keys_LBSF, new_keys_BTF), write(values_LBSF, new_values_BTF)
