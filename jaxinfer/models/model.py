"""A decoder with its parameters, as decoding strategies call it: whole or layer by layer."""

from dataclasses import dataclass
from typing import Any, cast

import jax

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.adapters import LOADED, bound
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, forward, output_logits
from jaxinfer.models.layer_range import run_layers
from jaxinfer.models.pipeline import run_stages
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Int, Params


@dataclass(frozen=True)
class Model:
    """A decoder with its parameters, for use inside a traced function.

    ``adapters_B`` says which of its loaded adapters each row of a batch has; None is none.
    """

    decoder: Decoder
    params: Params
    adapters_B: Any = None

    @classmethod
    def adapted(cls, decoder: Decoder, params: Params, adapters_B: Int[Array, " B"] | None) -> "Model":
        """Return a model with its loaded adapters, if it has any, for a batch whose rows have these; None is none."""
        if adapters_B is None or LOADED not in params:
            return cls(decoder, params)
        return cls(decoder, bound(params), adapters_B)

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config."""
        return self.decoder.config

    def forward(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        """Run all layers; see `Network.__call__`."""
        inputs = tokens_BT, positions_BT, cache, placements, context_lengths_B
        return forward(self.decoder, self.params, *inputs, self.adapters_B)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Return the logits of final hidden states, or of an earlier layer's normed ones."""
        return output_logits(self.decoder, self.params, hidden, self.adapters_B)

    def embedded(self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the hidden states before the first layer."""
        return self._apply("embedded", tokens_BT, positions_BT)

    def normed(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the final norm."""
        return self._apply("normed", hidden_BTD)

    def run_layers(
        self,
        start: int,
        stop: int,
        hidden_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
        adapters: Params | None = None,
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        """Run layers ``start .. stop - 1`` on hidden states, without the final norm.

        ``adapters`` (`jaxinfer.models.adapters`) are for these layers; the backend says for which tokens.
        """
        config, backend = self.config, self.decoder.backend
        step = build_step(config, backend, positions_BT, placements, context_lengths_B, self.adapters_B)
        run = run_layers if backend.stages == 1 else run_stages
        return run(config, backend, self.params["blocks"], (hidden_BTD, cache), start, stop, step, adapters)

    def _apply(self, method: str, *inputs: Any) -> jax.Array:
        inputs = *inputs, self.adapters_B
        return cast(jax.Array, self.decoder.apply({"params": self.params}, *inputs, method=method))
