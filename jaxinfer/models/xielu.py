"""An activation with parameters: xIELU."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.linear import parameter
from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rounding import rounded

_SHAPE = (1,)


class Xielu(nn.Module):
    """A parabola above zero, and the integral of an ELU below it (Huang and Schlag, 2411.13010).

    ``curvature`` and ``saturation`` are one number each, before the softplus that keeps them positive, and ``slope`` is
    that of both parts at zero.
    """

    backend: Backend

    @nn.compact
    def __call__(self, inputs: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        def scalar(name: str, value: float) -> jax.Array:
            dtype = jnp.dtype(self.backend.param_dtype)
            init = nn.initializers.constant(value)
            return parameter(self, name, init, (None,), _SHAPE, dtype).astype(jnp.promote_types(dtype, jnp.float32))

        slope = scalar("slope", 0.5)
        above, below = jax.nn.softplus(scalar("curvature", 0.2)), slope + jax.nn.softplus(scalar("saturation", -1.05))
        wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        # Products are rounded before a sum, so that their bits do not depend on what the compiler fuses.
        line = rounded(slope * wide)
        curved = jnp.where(
            wide > 0, rounded(above * wide * wide), rounded(below * (jnp.expm1(jnp.minimum(wide, 0.0)) - wide))
        )
        return (curved + line).astype(inputs.dtype)
