"""Linear layers and norms as Linen modules; parameters carry logical axis names for sharding."""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.matmul import linear


class Linear(nn.Module):
    """A kernel ``[out, in]`` and an optional bias ``[out]``; ``axes`` are their logical names."""

    features: int
    axes: tuple[str, str]
    backend: Backend
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        dtype = jnp.dtype(self.backend.param_dtype)
        kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        shape = (self.features, inputs.shape[-1])
        kernel = _parameter(self, "kernel", kernel_init, self.axes, shape, dtype)
        bias = None
        if self.use_bias:
            bias = _parameter(self, "bias", nn.initializers.zeros, self.axes[:1], (self.features,), dtype)
        return linear(inputs, kernel, bias, self.backend)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 1910.07467), computed in float32 or wider."""

    epsilon: float
    backend: Backend

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        dtype = jnp.dtype(self.backend.param_dtype)
        scale = _parameter(self, "scale", nn.initializers.ones, ("embed",), inputs.shape[-1:], dtype)
        wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.epsilon)).astype(inputs.dtype)
        return normed * jnp.broadcast_to(scale.astype(inputs.dtype), normed.shape)


class Table(nn.Module):
    """A matrix ``[V, D]`` that is read whole or by rows."""

    shape: tuple[int, int]
    parameter: str
    backend: Backend

    @nn.compact
    def __call__(self) -> Float[Array, "V D"]:
        dtype = jnp.dtype(self.backend.param_dtype)
        init = nn.initializers.normal(0.02)
        return _parameter(self, self.parameter, init, ("vocab", "embed"), self.shape, dtype)


def _parameter(
    module: nn.Module, name: str, init: Any, axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Declare a parameter under logical axis names; Linen hands back the bare array."""
    return cast(jax.Array, module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype))
