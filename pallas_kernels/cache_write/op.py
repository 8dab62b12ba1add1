"""Writes new tokens to a layer of a cache without a copy of the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write.kernel import Steps, write_blocks
from pallas_kernels.tuning import tuned_blocks

# The largest block of tuned.json, which `python -m pallas_kernels.autotune --kernel cache_write` chooses.
LARGEST_BLOCK = 64
Described = jax.Array | jax.ShapeDtypeStruct


def cache_write(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    count_B: jax.Array | None = None,
    *,
    num_sinks: int | None = None,
    block_slots: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write token i of row b, at position ``start_B[b] + i``, to its slot of ``cache[layer]``; return both caches.

    The caches ``[L, B, S, F]`` are updated in place if they are donated or carried. A position is a slot, and tokens
    past the cache's end are dropped. With ``num_sinks`` the cache is a ring after that many sinks, in the order of
    `ring_decode`, with at least T + 2 * ``block_slots`` slots. Only the first ``count_B`` tokens of a row are written
    (None: all). Starts are at least 0. The kernel reads, changes and writes back ``block_slots`` slots at a time: whole
    tiles of 32 bytes per lane.
    """
    batch, tokens, _ = new_keys_BTF.shape
    num_slots = keys_LBSF.shape[2]
    slot_tile = 32 // keys_LBSF.dtype.itemsize
    _check(keys_LBSF, values_LBSF, new_keys_BTF, new_values_BTF, start_B)
    block = block_slots or tuned_blocks("cache_write", write_shape(keys_LBSF, new_keys_BTF))["block_slots"]
    block = min(max(block, slot_tile), max(num_slots // slot_tile, 1) * slot_tile)
    if block % slot_tile:
        raise ValueError(f"cache_write: block_slots={block} is not a multiple of {slot_tile}, the slots of a tile")
    if num_sinks is not None and not fits_ring(num_slots, num_sinks, tokens, block):
        raise ValueError(
            f"cache_write: {tokens} tokens and two blocks of {block} exceed a ring of {num_slots} slots less "
            f"{num_sinks} sinks"
        )
    start_B = start_B.astype(jnp.int32)
    count_B = jnp.full(batch, tokens, jnp.int32) if count_B is None else jnp.clip(count_B.astype(jnp.int32), 0, tokens)
    padding = ((0, 0), (0, -tokens % block), (0, 0))
    return write_blocks(
        keys_LBSF,
        values_LBSF,
        jnp.pad(new_keys_BTF.astype(keys_LBSF.dtype), padding),
        jnp.pad(new_values_BTF.astype(keys_LBSF.dtype), padding),
        jnp.asarray(layer, jnp.int32),
        _plan_steps(start_B, count_B, tokens, num_slots, num_sinks, block),
        block_slots=block,
        interpret=interpret,
    )


def write_shape(keys_LBSF: Described, new_keys_BTF: Described) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    return {"T": new_keys_BTF.shape[1], "F": keys_LBSF.shape[3], "dtype": jnp.dtype(keys_LBSF.dtype).name}


def fits_ring(num_slots: int, num_sinks: int, tokens: int, block_slots: int = LARGEST_BLOCK) -> bool:
    """Tell whether tokens that go around a ring's end never return to the block where they began."""
    return num_slots - num_sinks >= tokens + 2 * block_slots


def _plan_steps(
    start_B: jax.Array, count_B: jax.Array, tokens: int, num_slots: int, num_sinks: int | None, block: int
) -> Steps:
    """Return the blocks from the first token's on; in a ring, the first blocks after the sinks follow the last one."""
    num_steps = (tokens + block - 2) // block + 1
    last = -(-num_slots // block) - 1
    if num_sinks is None:
        first_slot_B = jnp.minimum(start_B, num_slots)
        wrapped_slots, floor = 0, 0
    else:
        wrapped_slots, floor = num_slots - num_sinks, num_sinks
        around_B = num_sinks + (start_B - num_sinks) % wrapped_slots
        first_slot_B = jnp.where(start_B < num_sinks, start_B, around_B)
        num_steps += 1
    # A block past the end becomes the last one again; in a ring, the first block that does not hold only sinks.
    block_BX = first_slot_B[:, None] // block + jnp.arange(num_steps, dtype=jnp.int32)
    is_around_BX = (block_BX > last) if num_sinks is not None else jnp.zeros(block_BX.shape, bool)
    block_BX = jnp.where(is_around_BX, block_BX - last - 1 + floor // block, jnp.minimum(block_BX, last))
    ahead_BX = first_slot_B[:, None] - jnp.where(is_around_BX, wrapped_slots, 0) - block_BX * block
    lowest_BX = jnp.where(is_around_BX, floor - block_BX * block, 0)
    return Steps(block_BX, ahead_BX, lowest_BX, count_B)


def _check(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    start_B: jax.Array,
) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    batch, tokens, width = new_keys_BTF.shape
    held = (keys_LBSF.shape[1], keys_LBSF.shape[3])
    if keys_LBSF.shape != values_LBSF.shape or keys_LBSF.dtype != values_LBSF.dtype:
        raise ValueError(f"cache_write: keys {keys_LBSF.shape} and values {values_LBSF.shape} must be alike")
    if keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8):
        raise ValueError(f"cache_write: a cache of {keys_LBSF.dtype} is not supported: use bfloat16, float32 or int8")
    if new_keys_BTF.shape != new_values_BTF.shape or held != (batch, width) or start_B.shape != (batch,):
        raise ValueError(
            f"cache_write: new keys {new_keys_BTF.shape}, values {new_values_BTF.shape} and starts {start_B.shape} "
            f"do not fit a cache of {held[0]} rows and {held[1]} lanes"
        )
    if tokens < 1:
        raise ValueError("cache_write: there are no new tokens to write")
