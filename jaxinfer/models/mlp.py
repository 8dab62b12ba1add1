"""The dense feed-forward layer."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import Linear, project
from jaxinfer.models.norm import Norm
from jaxinfer.models.taps import tap
from jaxinfer.models.xielu import Xielu
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.active_products import MOST_ROWS, active_inputs, chosen_outputs
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.live_blocks import live_inputs, live_outputs, multiplies_live
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

# Products of `project`, None for those of all features.
Products = Callable[..., list[Any]] | None


class MLP(nn.Module):
    """The feed-forward layer: ``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))`` without a gate.

    With inner norms, what down multiplies is normed. ``width`` is that of the hidden features, the config's if it is
    None, and ``axis`` its logical name.
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
        has_parameters = config.activation == "xielu"
        activate = Xielu(self.backend, name="activation") if has_parameters else ACTIVATIONS[config.activation]

        wide = [
            Linear(self.width or config.ffn_dim, (axis, "embed"), self.backend, config.mlp_bias, name=name)
            for name in (("gate", "up") if config.gated_mlp else ("up",))
        ]
        down = Linear(config.model_dim, ("embed", axis), self.backend, config.mlp_bias, name="down")
        sparsity, (narrowing, widening) = self.backend.sparsity, self._partial_products(inputs_BTD, down)
        # A product that leaves outputs out comes after what says which.
        at_first = wide if narrowing is None else wide[:1]
        first_BTF, *rest = project(inputs_BTD, at_first, adapters_B)
        hidden_BTF = activate(tap(self, f"{wide[0].name}_product", first_BTF))
        if sparsity is not None:
            hidden_BTF = sparsity.keep(hidden_BTF)
        if widening is not None:
            chosen = partial(widening, active=hidden_BTF)
            rest = [flat for layer in wide[1:] for flat in project(inputs_BTD, [layer], adapters_B, chosen)]
        for layer, other_BTF in zip(wide[1:], rest):
            hidden_BTF = hidden_BTF * tap(self, f"{layer.name}_product", other_BTF)
        tap(self, "activated", hidden_BTF)
        if config.inner_norms:
            hidden_BTF = Norm(config, self.backend, axis, name="inner_norm")(hidden_BTF, adapters_B)
        return tap(self, "result", project(hidden_BTF, [down], adapters_B, narrowing)[0])

    def _partial_products(self, inputs_BTD: Float[Array, "B T D"], down: Linear) -> tuple[Products, Products]:
        """Return the products of down and up that leave features out, as those of `project`; None for all features."""
        batch, tokens, model_dim = inputs_BTD.shape
        if down.columns is not None and batch * tokens <= MOST_ROWS:
            return partial(active_inputs, columns=down.columns), chosen_outputs
        if multiplies_live(batch, tokens, model_dim, self.width or self.config.ffn_dim, self.backend):
            return live_inputs, live_outputs
        return None, None
