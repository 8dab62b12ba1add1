"""Normalisation layers, computed in float32 or wider."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import parameter
from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend


class Norm(nn.Module):
    """The config's norm, over the last axis.

    RMS normalisation is Zhang and Sennrich, 1910.07467; LayerNorm is Ba et al., 1607.06450. ``axis`` is the axis's
    logical name.
    """

    config: DecoderConfig
    backend: Backend
    axis: str = "embed"

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        kind, dtype = self.config.norm, jnp.dtype(self.backend.param_dtype)
        width = inputs.shape[-1:]
        neutral = nn.initializers.zeros if kind == "rms_plus_one" else nn.initializers.ones
        wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        if kind in ("layer", "plain_layer"):
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.norm_eps)
        if kind == "plain_layer":
            return normed.astype(inputs.dtype)
        scale = parameter(self, "scale", neutral, (self.axis,), width, dtype)
        if kind == "rms":
            normed = normed.astype(inputs.dtype)
            return normed * _over(scale, normed)
        if kind == "rms_plus_one":
            return (normed * (1.0 + _over(scale, normed))).astype(inputs.dtype)
        bias = parameter(self, "bias", nn.initializers.zeros, (self.axis,), width, dtype)
        return (normed * _over(scale, normed) + _over(bias, normed)).astype(inputs.dtype)


def _over(weights: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(weights.astype(like.dtype), like.shape)
