"""The reference of `quant_matmul`, in plain JAX and float32."""

import jax
import jax.numpy as jnp
from jax import lax


def quant_matmul_reference(
    x_MD: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    *,
    minima: jax.Array | None = None,
    offset: int = 0,
    layer: jax.Array | int | None = None,
    activation_scales_M: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Multiply by the dequantised weights; arguments and result [M, F] are those of `quant_matmul`."""
    if layer is not None:
        weights = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
        scales = lax.dynamic_index_in_dim(scales, layer, keepdims=False)
        minima = None if minima is None else lax.dynamic_index_in_dim(minima, layer, keepdims=False)
    exact_DF = weights.astype(jnp.float32) - (offset if weights.dtype == jnp.uint4 else 0)
    exact_DF *= _of_each_row(scales, exact_DF) if scales.ndim == 2 else scales.astype(jnp.float32)
    if minima is not None:
        exact_DF += _of_each_row(minima, exact_DF)
    out_MF = jnp.dot(x_MD.astype(jnp.float32), exact_DF, precision=lax.Precision.HIGHEST)
    if activation_scales_M is not None:
        out_MF *= activation_scales_M[:, None]
    return out_MF.astype(out_dtype)


def _of_each_row(groups_GF: jax.Array, weights_DF: jax.Array) -> jax.Array:
    if groups_GF.dtype == jnp.int16:
        groups_GF = lax.bitcast_convert_type(groups_GF, jnp.float16)
    return jnp.repeat(groups_GF.astype(jnp.float32), weights_DF.shape[0] // groups_GF.shape[0], axis=0)
