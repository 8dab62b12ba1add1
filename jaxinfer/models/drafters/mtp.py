"""A layer that predicts one token further: what MTP layers compute (DeepSeek-V3, 2412.19437; MiMo, 2505.07608).

It reads the model's last hidden state of a token, after the final norm, and the embedding of the next token, each
normed, joins them by a projection, and runs one block of the model's own kind over them. What comes out predicts the
token after the next by the model's own output matrix, and stands for the next token's hidden state when the layer is
used again.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import init_params
from jaxinfer.models.layer_range import apply_block
from jaxinfer.models.model import Model
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.matmul import linear

# The layer's norms among its parameters, beside ``project`` and ``block``.
NORMS = ("token_norm", "hidden_norm", "final_norm")


@dataclass(frozen=True)
class MtpForm:
    """How a kind of MTP layers is wired.

    ``tokens_first``: the projection reads the embedding, then the hidden state. ``passes_normed``: what is passed on is
    the output of the last norm, not its input.
    """

    tokens_first: bool
    passes_normed: bool


GLM_FORM, MIMO_FORM = MtpForm(True, False), MtpForm(False, True)


def mtp_config(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder whose one block an MTP layer of a model has: of the last layer's kind."""
    experts = config.experts if config.sparse_layers[-1] else None
    experts = experts and replace(experts, layer_pattern=(True,))
    return replace(config, num_layers=1, layer_pattern=config.layers[-1:], experts=experts)


def init_mtp(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw a layer's parameters; under ``jax.eval_shape`` this describes them."""
    own = replace(backend, scan_layers=False)
    whole = init_params(mtp_config(config), own, key)
    block = whole["blocks"]["layer_0"]
    width, dtype = config.model_dim, jnp.dtype(backend.param_dtype)
    noise_DJ = jax.random.normal(jax.random.fold_in(key, 1), (width, 2 * width)) * (2 * width) ** -0.5
    neutral = jax.tree.map(jnp.zeros_like, block["attention_norm"])
    if "scale" in neutral:
        neutral = {**neutral, "scale": jnp.full_like(neutral["scale"], config.neutral_scale)}
    norms = {name: jax.tree.map(jnp.array, neutral) for name in NORMS}
    return {"block": block, "project": {"kernel": noise_DJ.astype(dtype)}, **norms}


@dataclass(frozen=True)
class MtpLayer:
    """An MTP layer beside its model, for use inside a traced function."""

    model: Model
    params: Params
    form: MtpForm

    @property
    def config(self) -> DecoderConfig:
        """The decoder of its one block."""
        return mtp_config(self.model.config)

    @property
    def backend(self) -> Backend:
        """How it runs: drafts need not have the bits of other steps, and one layer has no stages."""
        return replace(self.model.decoder.backend, step_rows=1, stages=1)

    def run(
        self,
        hidden_BTD: Float[Array, "B T D"],
        next_tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        """Return what the layer passes on for each token, from its hidden state and the token after it.

        Positions are those of the hidden states. The layer was trained without the embedding beside the first one.
        """
        config, backend = self.config, self.backend
        embedded_BTD = self.model.embedded(next_tokens_BT, positions_BT + 1)
        embedded_BTD = jnp.where(positions_BT[..., None] == 0, 0, embedded_BTD)
        inputs = self._normed("hidden_norm", hidden_BTD), self._normed("token_norm", embedded_BTD)
        joined_BTJ = jnp.concatenate(inputs[::-1] if self.form.tokens_first else inputs, axis=-1)
        joined_BTD = linear(joined_BTJ, self.params["project"]["kernel"], None, backend)
        step = build_step(config, backend, positions_BT, placements, context_lengths_B)
        out_BTD, cache = apply_block(config, backend, 0, self.params["block"], (joined_BTD, cache), 0, step)
        return self._normed("final_norm", out_BTD) if self.form.passes_normed else out_BTD, cache

    def logits(self, out_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Return the logits of what the layer passes on."""
        return self.model.logits(out_BD if self.form.passes_normed else self._normed("final_norm", out_BD))

    def _normed(self, name: str, values: Any) -> jax.Array:
        # Imported here: a program that was compiled before needs no Linen.
        from jaxinfer.models.norm import Norm

        norm = Norm(self.config, self.backend, parent=None)
        return norm.apply({"params": self.params[name]}, values)  # pyright: ignore[reportReturnType]
