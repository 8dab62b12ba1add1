"""The list of a kernel's steps: one for each block of a row that is needed, none for the others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
    """Row and block of each step, row after row, and the number of steps; entries past it do not run.

    ``row_I`` and ``block_I`` have room for every block of every row.
    """

    row_I: jax.Array
    block_I: jax.Array
    count: jax.Array


def list_steps(first_B: jax.Array, last_B: jax.Array, num_blocks: int) -> Steps:
    """List the blocks ``first_B`` to ``last_B`` (included) of each row; every row has at least one."""
    batch = first_B.shape[0]
    counts_B = last_B - first_B + 1
    ends_B = jnp.cumsum(counts_B, dtype=jnp.int32)
    step_I = jnp.arange(batch * num_blocks, dtype=jnp.int32)
    row_I = jnp.minimum(jnp.sum(step_I[:, None] >= ends_B, axis=1, dtype=jnp.int32), batch - 1)
    # A sum over rows instead of a gather, which a TPU would run as a loop.
    offset_B = ends_B - last_B - 1
    is_row_IB = row_I[:, None] == jnp.arange(batch, dtype=jnp.int32)
    block_I = step_I - jnp.sum(jnp.where(is_row_IB, offset_B, 0), axis=1, dtype=jnp.int32)
    return Steps(row_I, jnp.clip(block_I, 0, num_blocks - 1), ends_B[-1])
