"""The reference of `quant_matmul`, in plain JAX and float32."""

import jax
import jax.numpy as jnp
from jax import lax


def quant_matmul_reference(
    x_MD: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    activation_scales_M: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Multiply by the dequantised weights; arguments and result [M, F] are those of `quant_matmul`."""
    if layer is not None:
        weights = lax.dynamic_index_in_dim(weights, layer, keepdims=False)
        scales = lax.dynamic_index_in_dim(scales, layer, keepdims=False)
    exact_DF = weights.astype(jnp.float32)
    if scales.ndim == 2:
        exact_DF *= jnp.repeat(scales, exact_DF.shape[0] // scales.shape[0], axis=0)
    else:
        exact_DF *= scales
    out_MF = jnp.dot(x_MD.astype(jnp.float32), exact_DF, precision=lax.Precision.HIGHEST)
    if activation_scales_M is not None:
        out_MF *= activation_scales_M[:, None]
    return out_MF.astype(out_dtype)
