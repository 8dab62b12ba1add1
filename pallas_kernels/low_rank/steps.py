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


def list_steps(ids_Y: jax.Array, blocks: int, number: int, most: int, together: int) -> Steps:
    """List the steps for each block of rows and the adapters, of ``number``, that rows of it have.

    ``most`` is how many adapters a block has at the most, ``together`` how many a step meets. Rows of a negative id
    have none.
    """
    ids_XM = ids_Y.reshape(blocks, -1)
    is_hit_XN = (ids_XM[:, :, None] == jnp.arange(number, dtype=jnp.int32)).any(axis=1)
    before_XN = jnp.cumsum(is_hit_XN, axis=1, dtype=jnp.int32)
    hits_X = before_XN[:, -1]
    ends_X = jnp.cumsum((hits_X + together - 1) // together, dtype=jnp.int32)
    step_I = jnp.arange(blocks * -(-min(most, number) // together), dtype=jnp.int32)
    # Sums over all pairs instead of gathers and scatters, which a TPU would run as loops.
    is_past_IX = ends_X <= step_I[:, None]
    rows_I = jnp.minimum(jnp.sum(is_past_IX, axis=1, dtype=jnp.int32), blocks - 1)
    is_its_IX = rows_I[:, None] == jnp.arange(blocks, dtype=jnp.int32)
    first_I = jnp.max(jnp.where(is_past_IX, ends_X, 0), axis=1)
    before_IN = jnp.sum(jnp.where(is_its_IX[:, :, None], before_XN, 0), axis=1, dtype=jnp.int32)
    place_GI = (step_I - first_I) * together + jnp.arange(together, dtype=jnp.int32)[:, None]
    found_GI = jnp.sum(before_IN <= place_GI[..., None], axis=-1, dtype=jnp.int32)
    is_met_GI = found_GI < number
    # Where a place is empty its last adapter stays; at first, that of the first place.
    last_GI = jax.lax.cummax(jnp.where(is_met_GI, step_I, -1), axis=1)
    is_last_GII = last_GI[:, :, None] == step_I
    kept_GI = jnp.sum(jnp.where(is_last_GII, found_GI[:, None], 0), axis=-1, dtype=jnp.int32)
    first = jnp.minimum(found_GI[0, 0], number - 1)
    return Steps(
        rows_I,
        jnp.where(last_GI < 0, first, kept_GI),
        jnp.where(is_met_GI, found_GI, NOBODY),
        jnp.maximum(ends_X[-1], 1),
    )
