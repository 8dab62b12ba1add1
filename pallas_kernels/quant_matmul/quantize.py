"""Round weights to 8 bits with a scale a channel, or to 4 bits with a scale a group of rows and a channel."""

import jax
import jax.numpy as jnp


def quantize_int8(weights_DF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 weights and their scales [F] (float32): the largest of a channel becomes 127."""
    scales_F = jnp.maximum(jnp.abs(weights_DF).max(0).astype(jnp.float32), 1e-30) / 127
    rounded_DF = jnp.round(weights_DF.astype(jnp.float32) / scales_F)
    return rounded_DF.astype(jnp.int8), scales_F


def quantize_int4(weights_DF: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Return int4 weights and their scales [D / group, F] (float32): the largest of a group becomes 7."""
    model_dim, channels = weights_DF.shape
    if model_dim % group:
        raise ValueError(f"{model_dim} rows do not split into groups of {group}")
    grouped = weights_DF.astype(jnp.float32).reshape(model_dim // group, group, channels)
    scales = jnp.maximum(jnp.abs(grouped).max(1), 1e-30) / 7
    rounded = jnp.round(grouped / scales[:, None]).reshape(model_dim, channels)
    return rounded.astype(jnp.int4), scales
