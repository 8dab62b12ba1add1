"""Grouped-query attention of new tokens against flat keys and values, in plain XLA."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float
from jaxinfer.ops.backend import Backend


def attend(
    query_BTNH: Float[Array, "B T N H"],
    keys_BSKH: Float[Array, "B S KH"],
    values_BSKH: Float[Array, "B S KH"],
    mask_BTS: Bool[Array, "B T S"],
    scale: float,
    backend: Backend,
) -> Float[Array, "B T N H"]:
    """Attend with softmax in float32 or wider; a query whose mask is empty gets the mean of all values.

    Keys and values hold the heads of a slot side by side (``K * H`` lanes). ``N`` is a multiple of ``K``.
    """
    batch, new_tokens, num_heads, head_dim = query_BTNH.shape
    slots = keys_BSKH.shape[1]
    num_kv_heads = keys_BSKH.shape[2] // head_dim
    query_BTKGH = query_BTNH.reshape(batch, new_tokens, num_kv_heads, -1, head_dim).astype(keys_BSKH.dtype)
    keys_BSKH4 = keys_BSKH.reshape(batch, slots, num_kv_heads, head_dim)
    values_BSKH4 = values_BSKH.reshape(batch, slots, num_kv_heads, head_dim)
    accumulator = jnp.promote_types(keys_BSKH.dtype, jnp.float32)
    scores_BKGTS = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        query_BTKGH,
        keys_BSKH4,
        precision=backend.precision,
        preferred_element_type=accumulator,
    )
    # Finite, so that a query without any visible key gives an average and not NaN, which would spread.
    lowest = jnp.finfo(accumulator).min
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS * scale, lowest)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    output_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH",
        weights_BKGTS.astype(values_BSKH.dtype),
        values_BSKH4,
        precision=backend.precision,
        preferred_element_type=accumulator,
    )
    return output_BTKGH.reshape(batch, new_tokens, num_heads, head_dim).astype(backend.compute_dtype)
