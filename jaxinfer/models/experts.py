"""The feed-forward layer of a mixture of experts (Shazeer et al., 1701.06538)."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import INPUTS, loaded_stacks, parameter, quantized_parameter
from jaxinfer.models.mlp import ACTIVATIONS, MLP
from jaxinfer.models.routing import choose_experts
from jaxinfer.models.taps import tap
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.experts import ExpertBiases, Kernels, OwnPairs, apply_experts, gating_of
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.low_rank import add_up, project_down
from jaxinfer.ops.matmul import product
from jaxinfer.ops.rounding import rounded

# In Linen's collection of what linear layers multiply: the tokens, each one's experts and their weights.
ROUTED = "routed"


class MixtureOfExperts(nn.Module):
    """A router's choice of experts for each token, and their weighted sum beside that of a shared expert, if any.

    The experts' kernels are stacked, ``[E, out, in]``, quantized or not. A row's loaded adapter may have parts in the
    router and in any expert, the shared one too (`jaxinfer.models.adapters`).
    """

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(
        self, inputs_BTD: Float[Array, "B T D"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        config, backend, experts = self.config, self.backend, self.config.experts
        assert experts is not None
        router = Scores(experts.num_experts, backend, experts.correction_bias, experts.bias, name="router")
        logits_BTE, correction_E = router(inputs_BTD, adapters_B)
        chosen_BTC, weights_BTC = choose_experts(tap(self, "logits", logits_BTE), correction_E, experts)
        self.sow(INPUTS, ROUTED, (inputs_BTD, chosen_BTC, weights_BTC))
        stacks = Stacks(config, backend, name="experts")
        kernels, own = stacks(), None
        if adapters_B is not None and (loaded := loaded_stacks(stacks)) is not None:
            own = OwnPairs.of(loaded, adapters_B - 1)
        biases = Biases(config, backend, name="expert_biases")() if experts.bias else None
        gating = gating_of(ACTIVATIONS[config.activation], experts.limit)
        apply = partial(apply_experts, kernels=kernels, gating=gating, backend=backend, biases=biases, own=own)
        output_BTD = (_to_scaled if experts.scales_inputs else _to_alike)(apply, inputs_BTD, chosen_BTC, weights_BTC)
        output_BTD = tap(self, "chosen", output_BTD)
        if experts.shared_dim:
            shared_BTD = MLP(config, backend, experts.shared_dim, "shared_ffn", name="shared")(inputs_BTD, adapters_B)
            if experts.shared_gate:
                logit_BT1, _ = Scores(1, backend, name="shared_gate")(inputs_BTD, adapters_B)
                shared_BTD = rounded(jax.nn.sigmoid(logit_BT1).astype(shared_BTD.dtype) * shared_BTD)
            output_BTD = output_BTD + shared_BTD
        return tap(self, "result", output_BTD)


def _to_alike(apply: Callable[..., jax.Array], inputs_BTD: jax.Array, *routed_BTC: jax.Array) -> jax.Array:
    return apply(inputs_BTD, *routed_BTC)


def _to_scaled(
    apply: Callable[..., jax.Array], inputs_BTD: jax.Array, chosen_BTC: jax.Array, weights_BTC: jax.Array
) -> jax.Array:
    """Give each expert the token times its weight, as if there were a token for each, and return the sum."""
    batch, num_tokens, per_token = chosen_BTC.shape
    scaled_BTCD = rounded(inputs_BTD[:, :, None] * weights_BTC[..., None].astype(inputs_BTD.dtype))
    each_BX1 = chosen_BTC.reshape(batch, -1, 1)
    output_BXD = apply(
        scaled_BTCD.reshape(batch, num_tokens * per_token, -1), each_BX1, jnp.ones_like(each_BX1, weights_BTC.dtype)
    )
    each_BTCD = output_BXD.reshape(batch, num_tokens, per_token, -1)
    # One after another: the order of a sum over an axis is the compiler's.
    return reduce(operator.add, [each_BTCD[:, :, place] for place in range(per_token)])


class Scores(nn.Module):
    """A few logits of each token, in float32 or wider; the weights are never rounded to fewer bits, nor split.

    Returns a correction of the scores ``[E]``, too, if there is one.
    """

    features: int
    backend: Backend
    has_correction: bool = False
    has_bias: bool = False

    @nn.compact
    def __call__(
        self, inputs_BTD: Float[Array, "B T D"], adapters_B: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T E"], Float[Array, " E"] | None]:
        dtype = jnp.promote_types(self.backend.param_dtype, jnp.float32)
        init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        weights_ED = parameter(self, "weights", init, (None, "embed"), (self.features, inputs_BTD.shape[-1]), dtype)
        correction_E = None
        if self.has_correction:
            correction_E = parameter(self, "correction", nn.initializers.zeros, (None,), (self.features,), dtype)
        # A TPU multiplies in bfloat16 unless both say float32.
        wide = replace(self.backend, param_dtype=dtype.name, compute_dtype=dtype.name)
        logits_BTE = product(inputs_BTD.astype(dtype), weights_ED.astype(dtype), wide)
        if adapters_B is not None and (own := loaded_stacks(self)) is not None:
            (inner_BTR,) = project_down(inputs_BTD, [own["down"]], adapters_B - 1, self.backend)
            logits_BTE = add_up(logits_BTE, inner_BTR, own["up"], adapters_B - 1, self.backend)
        if self.has_bias:
            bias_E = parameter(self, "bias", nn.initializers.zeros, (None,), (self.features,), dtype)
            logits_BTE = logits_BTE + jnp.broadcast_to(bias_E, logits_BTE.shape)
        return logits_BTE, correction_E


class Biases(nn.Module):
    """What is added to the products of all experts: of gate and up ``[E, F]``, of down ``[E, D]``."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(self) -> ExpertBiases:
        experts, dtype = self.config.experts, jnp.dtype(self.backend.param_dtype)
        assert experts is not None

        def rows(name: str, axis: str, width: int) -> jax.Array:
            return parameter(self, name, nn.initializers.zeros, ("expert", axis), (experts.num_experts, width), dtype)

        gate_EF, up_EF = (rows(name, "expert_ffn", experts.ffn_dim) for name in ("gate", "up"))
        return gate_EF, up_EF, rows("down", "embed", self.config.model_dim)


class Stacks(nn.Module):
    """The kernels of all experts: gate and up ``[E, F, D]``, and down ``[E, D, F]``."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(self) -> Kernels:
        experts, model_dim = self.config.experts, self.config.model_dim
        assert experts is not None
        init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0)

        def stack(name: str, out_axis: str, in_axis: str, outputs: int, inputs: int) -> Any:
            if self.has_variable("params", name) and isinstance(view := self.get_variable("params", name), LayerView):
                return view
            if (quantized := quantized_parameter(self, name)) is not None:
                return quantized
            shape, axes = (experts.num_experts, outputs, inputs), ("expert", out_axis, in_axis)
            return parameter(self, name, init, axes, shape, jnp.dtype(self.backend.param_dtype))

        return (
            stack("gate", "expert_ffn", "embed", experts.ffn_dim, model_dim),
            stack("up", "expert_ffn", "embed", experts.ffn_dim, model_dim),
            stack("down", "embed", "expert_ffn", model_dim, experts.ffn_dim),
        )
