"""Arranges queries for caches that hold the heads of a slot side by side, ``[.., K * H]``.

A kernel reads whole lane tiles of 128. If a head is narrower or wider, as many heads are joined as fill whole tiles
(two of 64, eight of 80, four of 96). Each query is in the lanes of its own key/value head, with zeros around it, so
that one product over the joined lanes reads the cache in its layout. The zeros cost nothing while a product has fewer
than 128 rows, because loading the keys takes the matrix unit as long as 128 rows.
"""

import jax
import jax.numpy as jnp

LANES = 128
SUBLANES = 8


def joined_heads(num_kv_heads: int, head_dim: int) -> int:
    """Return J, the fewest heads that fill whole lane tiles, or all heads if no number does."""
    for joined in range(1, num_kv_heads + 1):
        if num_kv_heads % joined == 0 and joined * head_dim % LANES == 0:
            return joined
    return num_kv_heads


def padded_rows(rows: int, row_tile: int, block_rows: int) -> int:
    """Return R: rows in whole tiles, and in whole blocks if there is more than one."""
    unit = row_tile if rows <= block_rows else block_rows
    return -(-rows // unit) * unit


def spread_queries(query_BTNH: jax.Array, num_kv_heads: int, rows: int, width: int) -> jax.Array:
    """Return ``[B, C, R, I]``: C groups of J joined heads; one row for each head of J, query of its group, and token.

    I is a group's part of the cache's ``width``. Rows past J * G * T and lanes past J * H are zeros.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    joined = joined_heads(num_kv_heads, head_dim)
    groups, per_kv = num_kv_heads // joined, num_heads // num_kv_heads
    query = query_BTNH.reshape(batch, tokens, groups, joined, per_kv, head_dim).transpose(0, 2, 3, 4, 1, 5)
    if joined > 1:
        own_JJ = jnp.eye(joined, dtype=bool)[:, None, None, :, None]
        query = jnp.where(own_JJ, query[..., None, :], jnp.zeros((), query.dtype))
    query = query.reshape(batch, groups, joined * per_kv * tokens, joined * head_dim)
    return jnp.pad(query, ((0, 0), (0, 0), (0, rows - query.shape[2]), (0, width // groups - query.shape[3])))


def gather_heads(mixed_BCRI: jax.Array, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> jax.Array:
    """Return ``[B, T, N, H]`` from the rows of `spread_queries`, each in the lanes of its own head."""
    batch, groups = mixed_BCRI.shape[:2]
    joined = num_kv_heads // groups
    per_kv = num_heads // num_kv_heads
    mixed = mixed_BCRI[:, :, : joined * per_kv * tokens, : joined * head_dim]
    mixed = mixed.reshape(batch, groups, joined, per_kv, tokens, joined, head_dim)
    if joined > 1:
        mixed = jnp.stack([mixed[:, :, head, :, :, head] for head in range(joined)], axis=2)
    else:
        mixed = mixed[..., 0, :]
    return mixed.transpose(0, 4, 1, 2, 3, 5).reshape(batch, tokens, num_heads, -1)


def spread_tokens(array_BTX: jax.Array, repeats: int, rows: int, beside: int = 1) -> jax.Array:
    """Repeat each token's values for the rows of `spread_queries`: ``[B, T, X]`` to ``[B, R, X]``.

    ``beside`` of the ``repeats`` are rows that follow one another.
    """
    tiled = jnp.tile(jnp.repeat(array_BTX, beside, axis=1), (1, repeats // beside, 1))
    return jnp.pad(tiled, ((0, 0), (0, rows - tiled.shape[1]), (0, 0)))
