"""The reference of ring_decode, in plain JAX and float32."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.flash_decode.reference import softmax_beside
from pallas_kernels.window import Window, oldest


def reference_ring(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    ancestors_BTT: jax.Array | None = None,
    sink_query_BTNH: jax.Array | None = None,
    *,
    window: Window,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits_N: ArrayLike | None = None,
) -> jax.Array:
    """Attend to ``cache[layer]``, with its slots gathered in the order of positions: ``[B, T, N, H]``.

    The token at position p < ``num_sinks`` is in slot p, any other in ``num_sinks + (p - num_sinks) % C``. Token i of a
    row is in the slot of position ``start + i``, but its position is ``start`` plus its depth. It attends to sinks and
    to those in its ``window``.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    num_slots, width = keys_LBSF.shape[2:]
    capacity = num_slots - num_sinks
    kv_heads = width // head_dim
    if ancestors_BTT is None:
        ancestors_BTT = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    ancestors_BTT = jnp.broadcast_to(ancestors_BTT, (batch, tokens, tokens))
    # All sinks, the last C positions before start, and the new tokens.
    ring_BC = jnp.maximum(start_B, num_sinks)[:, None] - capacity + jnp.arange(capacity)
    sink_BK = jnp.broadcast_to(jnp.arange(num_sinks), (batch, num_sinks))
    old_BX = jnp.concatenate([sink_BK, ring_BC], axis=1)
    is_sink_X = jnp.arange(num_sinks + capacity) < num_sinks
    is_held_BX = (old_BX < start_B[:, None]) & (is_sink_X | (old_BX >= num_sinks))
    text_BT = start_B[:, None] + jnp.arange(tokens)
    position_BT = start_B[:, None] + jnp.sum(ancestors_BTT, axis=-1) - 1
    sees_old_BTX = is_held_BX[:, None] & (is_sink_X | (old_BX[:, None] >= oldest(window, position_BT)[..., None]))
    near_BTT = (position_BT[:, None] < num_sinks) | (position_BT[:, None] >= oldest(window, position_BT)[..., None])
    visible_BTX = jnp.concatenate([sees_old_BTX, ancestors_BTT & near_BTT], axis=-1)
    text_BX = jnp.concatenate([old_BX, text_BT], axis=1)
    slot_BX = jnp.where(text_BX < num_sinks, text_BX, num_sinks + (text_BX - num_sinks) % capacity)
    slot_BX = jnp.clip(slot_BX, 0, num_slots - 1)

    def look_up(buffer_LBSF: jax.Array) -> jax.Array:
        held_BXF = jnp.take_along_axis(buffer_LBSF[layer].astype(jnp.float32), slot_BX[..., None], axis=1)
        held_BXF = jnp.where(jnp.any(visible_BTX, axis=1)[..., None], held_BXF, 0)
        return held_BXF.reshape(batch, -1, kv_heads, head_dim)

    keys, values = look_up(keys_LBSF), look_up(values_LBSF)

    def products(query_BTNH: jax.Array) -> jax.Array:
        query = query_BTNH.astype(keys_LBSF.dtype).astype(jnp.float32).reshape(batch, tokens, kv_heads, -1, head_dim)
        return jnp.einsum("btkgh,bxkh->bkgtx", query, keys, precision="highest")

    scores = products(query_BTNH)
    if sink_query_BTNH is not None:
        at_sink_BX = text_BX < num_sinks
        scores = jnp.where(at_sink_BX[:, None, None, None], products(sink_query_BTNH), scores)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    weights = softmax_beside(jnp.where(visible_BTX[:, None, None], scores, -jnp.inf), sink_logits_N)
    mixed = jnp.einsum("bkgtx,bxkh->btkgh", weights, values, precision="highest")
    return mixed.reshape(batch, tokens, num_heads, head_dim).astype(query_BTNH.dtype)
