"""The list of live blocks: 128 neighbouring hidden units, of which some activation is not zero in some row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

UNITS = 128  # of a block: the lanes of a tile


class LiveBlocks(NamedTuple):
    """The indices of live blocks in ascending order, with room for all, and their number; entries past it are 0."""

    index_I: jax.Array
    count: jax.Array


def count_blocks(units: int) -> int:
    """Return how many blocks so many units are; the last may have fewer."""
    return -(-units // UNITS)


def list_blocks(hidden_MF: jax.Array) -> LiveBlocks:
    """List the blocks of hidden units that are not zero in all rows; NaN is not zero."""
    num_blocks = count_blocks(hidden_MF.shape[1])
    missing = num_blocks * UNITS - hidden_MF.shape[1]
    live_F = jnp.pad(jnp.any(hidden_MF != 0, axis=0), (0, missing))
    live_X = jnp.any(live_F.reshape(num_blocks, UNITS), axis=1)
    # Sums over all pairs instead of a sort or a gather, which a TPU would run as loops.
    block_X = jnp.arange(num_blocks, dtype=jnp.int32)
    before_X = jnp.sum(live_X & (block_X < block_X[:, None]), axis=1, dtype=jnp.int32)
    is_at_IX = live_X & (before_X == block_X[:, None])
    index_I = jnp.sum(jnp.where(is_at_IX, block_X, 0), axis=1, dtype=jnp.int32)
    return LiveBlocks(index_I, jnp.sum(live_X, dtype=jnp.int32))
