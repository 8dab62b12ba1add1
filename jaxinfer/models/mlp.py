"""The dense feed-forward layer."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import Linear, project
from jaxinfer.models.taps import tap
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rounding import rounded

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": lambda inputs: jax.nn.gelu(inputs, approximate=False),
        "gelu_tanh": lambda inputs: jax.nn.gelu(inputs, approximate=True),
        "quick_gelu": lambda inputs: inputs * jax.nn.sigmoid(rounded(1.702 * inputs)),
        "relu": jax.nn.relu,
        "relu_squared": lambda inputs: jnp.square(jax.nn.relu(inputs)),
    }
)


class MLP(nn.Module):
    """The feed-forward layer: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate.

    ``width`` is that of the hidden features, the config's if it is None, and ``axis`` its logical name.
    """

    config: DecoderConfig
    backend: Backend
    width: int | None = None
    axis: str = "ffn"

    @nn.compact
    def __call__(
        self, inputs_BTD: Float[Array, "B T D"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        config, axis = self.config, self.axis
        activate = ACTIVATIONS[config.activation]

        wide = [
            Linear(self.width or config.ffn_dim, (axis, "embed"), self.backend, config.mlp_bias, name=name)
            for name in (("gate", "up") if config.gated_mlp else ("up",))
        ]
        first_BTF, *rest = (
            tap(self, f"{layer.name}_product", flat) for layer, flat in zip(wide, project(inputs_BTD, wide, adapters_B))
        )
        hidden_BTF = activate(first_BTF)
        for other_BTF in rest:
            hidden_BTF = hidden_BTF * other_BTF
        tap(self, "activated", hidden_BTF)
        down = Linear(config.model_dim, ("embed", axis), self.backend, config.mlp_bias, name="down")
        return tap(self, "result", down(hidden_BTF, adapters_B))
