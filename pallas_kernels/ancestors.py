"""Encodes for kernels which of the new tokens each new token attends to."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.head_groups import LANES, spread_tokens
from pallas_kernels.window import Chunk, Window, oldest


def encode_ancestors(
    ancestors_BTT: jax.Array | None,
    num_tokens: int,
    window: Window | None,
    repeats: int,
    rows: int,
    start_B: jax.Array,
    num_sinks: int = 0,
    beside: int = 1,
) -> jax.Array:
    """Return ``[B or 1, R, A]`` in bfloat16: lane j is 1 if a row attends to new token j, the last lane is its depth.

    Tokens attend to themselves and their ancestors; in a chain (None), to all tokens before them. A ``window`` keeps
    what it spans along the path from position ``start_B`` on, and the first ``num_sinks`` positions. Rows are those of
    `spread_tokens`, with ``repeats`` = J * G; rows past the tokens attend to nothing. Zero, one and depths up to 256
    are exact in bfloat16.
    """
    if ancestors_BTT is None:
        ancestors_BTT = jnp.asarray(np.tri(num_tokens, dtype=bool)[None])
    depth_BT = jnp.sum(ancestors_BTT, axis=-1, dtype=jnp.int32) - 1
    seen_BTT = ancestors_BTT
    if window is not None:
        # Where a chunk begins depends on the row.
        place_BT = start_B[:, None] + depth_BT if isinstance(window, Chunk) else depth_BT
        is_near_BTT = place_BT[:, None, :] >= oldest(window, place_BT)[:, :, None]
        if num_sinks:
            is_near_BTT = is_near_BTT | (depth_BT[:, None, :] <= (num_sinks - 1 - start_B)[:, None, None])
        seen_BTT = seen_BTT & is_near_BTT
        depth_BT = jnp.broadcast_to(depth_BT, seen_BTT.shape[:2])
    lanes = encoded_lanes(num_tokens)
    seen_BTA = jnp.pad(seen_BTT.astype(jnp.bfloat16), ((0, 0), (0, 0), (0, lanes - num_tokens - 1)))
    encoded_BTA = jnp.concatenate([seen_BTA, depth_BT[..., None].astype(jnp.bfloat16)], axis=-1)
    return spread_tokens(encoded_BTA, repeats, rows, beside)


def encode_places(num_tokens: int, repeats: int, rows: int, beside: int = 1) -> jax.Array:
    """Return ``[1, R, 128]`` int32: the number of each row's token in a chain, for the rows of `spread_tokens`."""
    place_1TA = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None], (1, num_tokens, LANES))
    return spread_tokens(place_1TA, repeats, rows, beside)


def encoded_lanes(num_tokens: int) -> int:
    """Return A: one lane for each token and one for the depth, in whole tiles."""
    return -(-(num_tokens + 1) // LANES) * LANES


def sees_new_token(encoded_RA: jax.Array, offset_1S: jax.Array) -> jax.Array:
    """Return ``[R, S]``: which rows attend to the slots that hold new token ``offset_1S``; false for other offsets.

    For use inside kernels. It is a product with a one-hot matrix, because no unit looks up lanes by number.
    """
    lanes, slots = encoded_RA.shape[1], offset_1S.shape[1]
    token_AS = jax.lax.broadcasted_iota(jnp.int32, (lanes, slots), 0)
    is_token_AS = (token_AS == offset_1S) & (token_AS < lanes - 1)
    one_hot_AS = is_token_AS.astype(jnp.float32).astype(jnp.bfloat16)
    seen_RS = jax.lax.dot_general(encoded_RA, one_hot_AS, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return seen_RS > 0.5


def depth_of_rows(encoded_RA: jax.Array) -> jax.Array:
    """Return ``[R, 1]``, each row's depth after the first new token."""
    lanes = encoded_RA.shape[1]
    return encoded_RA[:, lanes - 1 :].astype(jnp.float32).astype(jnp.int32)
