"""Linear layers and norms as Linen modules; parameters carry logical axis names for sharding."""

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
        kernel = self.param("kernel", nn.with_logical_partitioning(kernel_init, self.axes), shape, dtype)
        bias = None
        if self.use_bias:
            bias_init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[:1])
            bias = self.param("bias", bias_init, (self.features,), dtype)
        return linear(inputs, kernel, bias, self.backend)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich, 1910.07467), computed in float32 or wider."""

    epsilon: float
    backend: Backend

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = self.param("scale", init, inputs.shape[-1:], jnp.dtype(self.backend.param_dtype))
        wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.epsilon)).astype(inputs.dtype)
        return normed * jnp.broadcast_to(scale.astype(inputs.dtype), normed.shape)
