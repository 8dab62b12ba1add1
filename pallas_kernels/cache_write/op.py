"""Writing new tokens into a layer of a cache without a copy of it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write.kernel import write_tiles

MAX_TOKENS = 128


def cache_write(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write token i of row b to slot ``start_B[b] + i`` of ``cache[layer]``, and return both caches.

    The caches ``[L, B, S, F]`` are updated where they lie if they are donated or carried. Tokens past the cache's end
    are dropped; starts are at least 0.
    """
    batch, tokens, width = new_keys_BTF.shape
    held = (keys_LBSF.shape[1], keys_LBSF.shape[3])
    if keys_LBSF.shape != values_LBSF.shape or keys_LBSF.dtype != values_LBSF.dtype:
        raise ValueError(f"cache_write: keys {keys_LBSF.shape} and values {values_LBSF.shape} must be alike")
    if keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"cache_write: a cache of {keys_LBSF.dtype} is not supported: use bfloat16 or float32")
    if new_keys_BTF.shape != new_values_BTF.shape or held != (batch, width) or start_B.shape != (batch,):
        raise ValueError(
            f"cache_write: new keys {new_keys_BTF.shape}, values {new_values_BTF.shape} and starts {start_B.shape} "
            f"do not fit a cache of {held[0]} rows and {held[1]} lanes"
        )
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"cache_write takes 1 to {MAX_TOKENS} new tokens, not {tokens}")
    slot_tile = 32 // keys_LBSF.dtype.itemsize
    rows = -(-max(tokens, slot_tile) // slot_tile) * slot_tile

    def padded(new_BTF: jax.Array) -> jax.Array:
        return jnp.pad(new_BTF.astype(keys_LBSF.dtype), ((0, 0), (0, rows - tokens), (0, 0)))

    return write_tiles(
        keys_LBSF,
        values_LBSF,
        padded(new_keys_BTF),
        padded(new_values_BTF),
        jnp.asarray(layer, jnp.int32),
        start_B.astype(jnp.int32),
        num_tokens=tokens,
        slot_tile=slot_tile,
        interpret=interpret,
    )
