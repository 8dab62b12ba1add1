"""Attention of few tokens to a cache on the CPU, in one pass over the visible slots.

Dao et al., "FlashAttention" (https://arxiv.org/abs/2205.14135). It uses the functions of `products`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.cpu_kernels.attention_code import CHUNK, attention_module, scratch_numbers
from jaxinfer.ops.cpu_kernels.machine_code import call
from jaxinfer.ops.cpu_kernels.products import combines


def attends(dtype: Any, head_dim: int) -> bool:
    """Whether `attend_to_seen` supports keys and values of a dtype and a head width."""
    return combines(dtype, head_dim)


@jax.custom_jvp
def attend_to_seen(
    query_BCRTH: Float[Array, "B C R T H"],
    keys_LBSF: Float[Array, "L B S F"],
    values_LBSF: Float[Array, "L B S F"],
    layer: Int[Array, ""] | int,
    mask_BTE: Bool[Array, "B T E"],
) -> Float[Array, "B C R T H"]:
    """Attend from scaled queries to the first E slots of ``keys[layer]``; return the weighted means, in float32.

    All inputs are float32. A slot has C heads of H numbers, and may have more. It does not read slots after the last
    visible one of a batch row, and reads fewer than one vector's lanes before the first. A query without visible slots
    gets the mean of all E. Check `attends` first.
    """
    batch, heads, group, tokens, numbers = query_BCRTH.shape
    extent = mask_BTE.shape[2]
    shape, dtype = keys_LBSF.shape, keys_LBSF.dtype
    fits = shape[1] == batch and extent <= shape[2] and heads * numbers <= shape[3]
    are_alike = values_LBSF.shape == shape and mask_BTE.shape[:2] == (batch, tokens)
    is_single = query_BCRTH.dtype == values_LBSF.dtype == dtype == jnp.float32
    # The kernel itself checks nothing.
    if not fits or not are_alike or not is_single or 0 in (*query_BCRTH.shape, *shape, extent):
        arrays = query_BCRTH, keys_LBSF, values_LBSF, mask_BTE
        raise ValueError(f"{', '.join(f'{array.dtype}{array.shape}' for array in arrays)} do not fit")
    hidden_BTP = jnp.where(mask_BTE, jnp.float32(0), jnp.finfo(jnp.float32).min)
    hidden_BTP = jnp.pad(hidden_BTP, ((0, 0), (0, 0), (0, -extent % CHUNK)))
    sees_none_BT = ~jnp.any(mask_BTE, axis=2)
    is_seen_BE = jnp.any(mask_BTE | sees_none_BT[..., None], axis=1)
    first_B, after_B = jnp.argmax(is_seen_BE, axis=1), extent - jnp.argmax(is_seen_BE[:, ::-1], axis=1)
    ranges_B2 = jnp.stack([first_B, after_B], axis=1).astype(jnp.int32)
    items, rows, chunks = batch * heads, group * tokens, hidden_BTP.shape[2] // CHUNK
    results = (
        jax.ShapeDtypeStruct((items, rows, numbers), jnp.float32),
        jax.ShapeDtypeStruct((items * chunks, scratch_numbers(rows, numbers)), jnp.float32),
    )
    query_IXH = query_BCRTH.reshape(items, rows, numbers)
    operands = query_IXH, jnp.asarray(layer, jnp.int32), keys_LBSF, values_LBSF, hidden_BTP, ranges_B2
    means_IXH, _ = call("attend", attention_module, dtype.name, results, *operands)
    return means_IXH.reshape(query_BCRTH.shape)


@attend_to_seen.defjvp
def _attend_jvp(primals: Any, tangents: Any) -> Any:
    def reference(query_BCRTH: Any, keys_LBSF: Any, values_LBSF: Any, layer: Any, mask_BTE: Any) -> Any:
        batch, heads, *_, numbers = query_BCRTH.shape
        extent = mask_BTE.shape[2]
        keys_BSCH, values_BSCH = (
            stack[layer, :, :extent, : heads * numbers].reshape(batch, extent, heads, numbers)
            for stack in (keys_LBSF, values_LBSF)
        )
        precision = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bcrth,bsch->bcrts", query_BCRTH, keys_BSCH, precision=precision)
        scores = jnp.where(mask_BTE[:, None, None], scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bcrts,bsch->bcrth", jax.nn.softmax(scores), values_BSCH, precision=precision)

    return attend_to_seen(*primals), jax.jvp(reference, primals, tangents)[1]
