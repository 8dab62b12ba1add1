"""The reference of `flash_prefill`, in plain JAX at the highest precision, with all scores in memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_kernels.flash_decode.reference import softmax_beside
from pallas_kernels.window import Window, oldest


def reference_prefill(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int = 0,
    start_B: jax.Array | None = None,
    length_B: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    sink_logits_N: ArrayLike | None = None,
) -> jax.Array:
    """Return ``[B, T, N, H]`` in float32, zeros for tokens past a row's length.

    Token t of row b is in slot ``start_B[b] + t`` and attends to the slots up to its own, or those in its ``window``.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    num_slots = keys_LBSF.shape[2]
    token_T, slot_S = jnp.arange(tokens), jnp.arange(num_slots)
    start_B = jnp.zeros(batch, jnp.int32) if start_B is None else start_B
    length_B = jnp.full(batch, tokens, jnp.int32) if length_B is None else length_B
    own_BT1 = (start_B[:, None] + token_T)[..., None]
    seen_BTS = slot_S <= own_BT1
    if window is not None:
        seen_BTS &= slot_S >= oldest(window, own_BT1)
    is_token_BT = token_T < length_B[:, None]
    # Slots that no token attends to may hold anything, even NaN.
    used_BS = jnp.any(seen_BTS & is_token_BT[..., None], axis=1)
    query = query_BTNH.astype(jnp.float32).reshape(
        batch, tokens, -1, num_heads * head_dim // keys_LBSF.shape[3], head_dim
    )
    keys, values = (
        jnp.where(used_BS[..., None], array[layer].astype(jnp.float32), 0.0).reshape(batch, num_slots, -1, head_dim)
        for array in (keys_LBSF, values_LBSF)
    )
    exact = lax.Precision.HIGHEST
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", query, keys, precision=exact)
    scores_BKGTS *= head_dim**-0.5 if scale is None else scale
    if softcap is not None:
        scores_BKGTS = softcap * jnp.tanh(scores_BKGTS / softcap)
    scores_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = softmax_beside(scores_BKGTS, sink_logits_N)
    mixed = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, values, precision=exact)
    return jnp.where(is_token_BT[..., None, None], mixed.reshape(query_BTNH.shape), 0.0)
