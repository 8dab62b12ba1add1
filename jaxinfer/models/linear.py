"""Linear layers and tables as Linen modules; parameters carry logical axis names for sharding."""

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
    axes: tuple[str | None, str | None]
    backend: Backend
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        dtype = jnp.dtype(self.backend.param_dtype)
        kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        shape = (self.features, inputs.shape[-1])
        kernel = parameter(self, "kernel", kernel_init, self.axes, shape, dtype)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.axes[:1], (self.features,), dtype)
        return linear(inputs, kernel, bias, self.backend)


class Table(nn.Module):
    """A matrix ``[V, D]`` that is read whole or by rows; ``axes`` are the logical names of its axes."""

    shape: tuple[int, int]
    parameter: str
    backend: Backend
    axes: tuple[str | None, str] = ("vocab", "embed")

    @nn.compact
    def __call__(self) -> Float[Array, "V D"]:
        dtype = jnp.dtype(self.backend.param_dtype)
        init = nn.initializers.normal(0.02)
        return parameter(self, self.parameter, init, self.axes, self.shape, dtype)


def parameter(
    module: nn.Module, name: str, init: Any, axes: tuple[str | None, ...], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Declare a parameter under logical axis names; Linen hands back the bare array."""
    return cast(jax.Array, module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype))
