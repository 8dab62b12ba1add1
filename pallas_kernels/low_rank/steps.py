"""Lists which blocks of rows meet which adapters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NOBODY = -2


class Steps(NamedTuple):
    """The block of rows of each step, the adapters that it meets, and the number of steps, at least one.

    Steps of one block follow each other. ``fetched_GI`` are a step's G adapters, ``met_GI`` the same, or `NOBODY` where
    there are fewer: what is fetched there was fetched for the step before.
    """

    rows_I: jax.Array
    fetched_GI: jax.Array
    met_GI: jax.Array
    count: jax.Array


def list_steps(ids_Y: jax.Array, blocks: int, most: int, together: int) -> Steps:
    """List the steps for each block of rows and the adapters that rows of it have.

    ``most`` is how many adapters a block has at the most, ``together`` how many a step meets. Rows of a negative id
    have none.
    """
    ids_XM = ids_Y.reshape(blocks, -1)
    rows_M = jnp.arange(ids_XM.shape[1], dtype=jnp.int32)
    # Adapters of a block in the order of the first rows that have them: there may be far more than rows.
    has_before_XM = ((ids_XM[:, :, None] == ids_XM[:, None]) & (rows_M < rows_M[:, None])).any(axis=2)
    is_first_XM = (ids_XM >= 0) & ~has_before_XM
    before_XM = jnp.cumsum(is_first_XM, axis=1, dtype=jnp.int32)
    hits_X = before_XM[:, -1]
    ends_X = jnp.cumsum((hits_X + together - 1) // together, dtype=jnp.int32)
    step_I = jnp.arange(blocks * -(-most // together), dtype=jnp.int32)
    # Sums over all pairs instead of gathers and scatters, which a TPU would run as loops.
    is_past_IX = ends_X <= step_I[:, None]
    rows_I = jnp.minimum(jnp.sum(is_past_IX, axis=1, dtype=jnp.int32), blocks - 1)
    is_its_IX = rows_I[:, None] == jnp.arange(blocks, dtype=jnp.int32)
    first_I = jnp.max(jnp.where(is_past_IX, ends_X, 0), axis=1)
    before_IM, ids_IM = (
        jnp.sum(jnp.where(is_its_IX[:, :, None], each, 0), axis=1, dtype=jnp.int32) for each in (before_XM, ids_XM)
    )
    place_GI = (step_I - first_I) * together + jnp.arange(together, dtype=jnp.int32)[:, None]
    row_GI = jnp.sum(before_IM <= place_GI[..., None], axis=-1, dtype=jnp.int32)
    found_GI = jnp.sum(jnp.where(row_GI[..., None] == rows_M, ids_IM, 0), axis=-1, dtype=jnp.int32)
    is_met_GI = row_GI < len(rows_M)
    # Where a place is empty its last adapter stays; at first, that of the first place.
    last_GI = jax.lax.cummax(jnp.where(is_met_GI, step_I, -1), axis=1)
    is_last_GII = last_GI[:, :, None] == step_I
    kept_GI = jnp.sum(jnp.where(is_last_GII, found_GI[:, None], 0), axis=-1, dtype=jnp.int32)
    return Steps(
        rows_I,
        jnp.where(last_GI < 0, found_GI[0, 0], kept_GI),
        jnp.where(is_met_GI, found_GI, NOBODY),
        jnp.maximum(ends_X[-1], 1),
    )
