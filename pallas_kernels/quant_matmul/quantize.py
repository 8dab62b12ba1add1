"""Rounds weights to 8 bits with one scale per channel, or to 4 bits with one per channel and group of rows."""

import jax
import jax.numpy as jnp


def quantize_int8(weights_DF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 weights and their scales [F] (float32): a channel's largest weight becomes 127."""
    scales_F = jnp.maximum(jnp.abs(weights_DF).max(0).astype(jnp.float32), 1e-30) / 127
    rounded_DF = jnp.round(weights_DF.astype(jnp.float32) / scales_F)
    return rounded_DF.astype(jnp.int8), scales_F


def quantize_int4(weights_DF: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """Return int4 weights and their scales [D / group, F] (float32): a group's largest weight becomes 7."""
    model_dim, channels = weights_DF.shape
    if model_dim % group:
        raise ValueError(f"{model_dim} rows do not split into groups of {group}")
    grouped = weights_DF.astype(jnp.float32).reshape(model_dim // group, group, channels)
    scales = jnp.maximum(jnp.abs(grouped).max(1), 1e-30) / 7
    rounded = jnp.round(grouped / scales[:, None]).reshape(model_dim, channels)
    return rounded.astype(jnp.int4), scales
