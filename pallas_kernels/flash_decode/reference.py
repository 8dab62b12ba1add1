"""The reference of flash_decode and tree_verify, in plain JAX and float32."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.byte_rows import to_numbers
from pallas_kernels.window import Window, oldest


def reference_attention(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    ancestors_BTT: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: ArrayLike | None = None,
) -> jax.Array:
    """Attend to ``cache[layer]`` with every score computed, masked and normalised in float32: ``[B, T, N, H]``.

    Token i of row b is in slot ``start_B[b] + i``. It attends to all slots before ``start``, to itself and to its
    ancestors among the new tokens (None: all before it); of these, to the ``window`` along its path.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    num_slots, width = keys_LBSF.shape[2:]
    num_kv_heads = num_kv_heads or width // head_dim
    in_bytes = keys_LBSF.dtype == jnp.int8

    def by_head(buffer: jax.Array) -> jax.Array:
        rows = buffer[layer]
        numbers = to_numbers(rows, num_kv_heads, head_dim) if in_bytes else rows[..., : num_kv_heads * head_dim]
        return numbers.astype(jnp.float32).reshape(batch, num_slots, num_kv_heads, head_dim)

    keys, values = by_head(keys_LBSF), by_head(values_LBSF)
    visible_BTS = visible_slots(start_B, ancestors_BTT, tokens, num_slots, window)
    query = (query_BTNH if in_bytes else query_BTNH.astype(keys_LBSF.dtype)).astype(jnp.float32)
    query = query.reshape(batch, tokens, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, keys, precision="highest")
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible_BTS[:, None, None], scores, -jnp.inf)
    weights = softmax_beside(scores, sink_logits_N)
    # A slot that no token attends to must not count, even if it holds NaN.
    values = jnp.where(jnp.any(visible_BTS, axis=1)[..., None, None], values, 0)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, values, precision="highest")
    return mixed.reshape(batch, tokens, num_heads, head_dim).astype(query_BTNH.dtype)


def softmax_beside(scores_BKGTS: jax.Array, sink_logits_N: ArrayLike | None) -> jax.Array:
    """Return the softmax of scores beside one of each head that no slot has, without that one's weight."""
    if sink_logits_N is None:
        return jax.nn.softmax(scores_BKGTS, axis=-1)
    kv_heads, group = scores_BKGTS.shape[1:3]
    sinks = jnp.asarray(sink_logits_N, scores_BKGTS.dtype).reshape(kv_heads, group, 1, 1)
    sinks = jnp.broadcast_to(sinks, (*scores_BKGTS.shape[:4], 1))
    beside = jnp.concatenate([scores_BKGTS, sinks], axis=-1)
    return jax.nn.softmax(beside, axis=-1)[..., :-1]


def visible_slots(
    start_B: jax.Array, ancestors_BTT: jax.Array | None, tokens: int, num_slots: int, window: Window | None
) -> jax.Array:
    """Return ``[B, T, S]``: what each new token attends to."""
    if ancestors_BTT is None:
        ancestors_BTT = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    batch = start_B.shape[0]
    ancestors_BTT = jnp.broadcast_to(ancestors_BTT, (batch, tokens, tokens))
    offset_BS = jnp.arange(num_slots) - start_B[:, None]
    depth_BT = jnp.sum(ancestors_BTT, axis=-1) - 1
    index_B1S = jnp.clip(offset_BS, 0, tokens - 1)[:, None, :]
    is_new_B1S = ((offset_BS >= 0) & (offset_BS < tokens))[:, None, :]
    new_BTS = is_new_B1S & jnp.take_along_axis(ancestors_BTT, index_B1S, axis=2)
    depth_B1S = jnp.where(is_new_B1S, jnp.take_along_axis(depth_BT[:, None, :], index_B1S, axis=2), offset_BS[:, None])
    visible_BTS = (offset_BS < 0)[:, None, :] | new_BTS
    if window is not None:
        own_BT1 = start_B[:, None, None] + depth_BT[..., None]
        visible_BTS &= start_B[:, None, None] + depth_B1S >= oldest(window, own_BT1)
    return visible_BTS
