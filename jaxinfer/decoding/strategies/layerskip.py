"""LayerSkip: the model's first layers draft, all of them verify (Elhoushi et al., 2404.16710)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.decoding.drafting.chain import draft_chain
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Nodes, Proposal, Strategy, Target, Verified
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int


@dataclass(frozen=True)
class LayerSkip(Strategy):
    """Draft a chain with the layers before ``exit_layer``, the final norm and the output matrix.

    Both phases share one cache, and verification goes on from the drafts' hidden states at the exit: no layer runs
    twice on a token. ``exit_layer`` 0 means a quarter of the layers.
    """

    name: ClassVar[str] = "layerskip"
    description: ClassVar[str] = "draft with the model's own first layers, verify with the others"

    exit_layer: int = 0
    num_draft_tokens: int = 6
    verify: Literal["match", "rejection"] = "match"

    def __post_init__(self) -> None:
        check_range(self, "exit_layer", 0, 1000)
        check_range(self, "num_draft_tokens", 1, 32)
        check_choice(self, "verify", ("match", "rejection"))

    @property
    def acceptance(self) -> str:
        return self.verify

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def branches(self) -> bool:
        return False

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def resolve(self, target: Target) -> "LayerSkip":
        """Check that the exit is inside the model."""
        self.exit_of(target.config)
        return self

    def exit_of(self, config: DecoderConfig) -> int:
        """Return the first layer that drafting does not run; raises InvalidOption where there is none such."""
        if config.num_layers == 1:
            raise InvalidOption("layerskip: a model of one layer cannot draft for itself: use another strategy")
        exit_layer = self.exit_layer or max(1, config.num_layers // 4)
        if exit_layer >= config.num_layers:
            raise InvalidOption(
                f"layerskip: exit_layer={exit_layer} is not inside the model's {config.num_layers} layers: "
                f"choose 1 to {config.num_layers - 1}"
            )
        return exit_layer

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        exit_layer, count = self.exit_of(model.config), self.num_draft_tokens
        batch, start_B = state.lengths_B.shape[0], state.lengths_B - 1
        exits_BMD = jnp.zeros((batch, count + 1, model.config.model_dim), model.decoder.backend.compute_dtype)

        def next_logits(token_B: Int[Array, " B"], index: Int[Array, ""], carry: Any) -> tuple[Array, Any]:
            cache, exits_BMD = carry
            hidden_B1D, cache = _run_first(model, exit_layer, state._replace(cache=cache), token_B, start_B + index)
            exits_BMD = exits_BMD.at[:, index].set(hidden_B1D[:, 0])
            return model.logits(model.normed(hidden_B1D))[:, 0], (cache, exits_BMD)

        carry = (state.cache, exits_BMD)
        draft = draft_chain(state, next_logits, carry, count, count, self.verify, model.config.vocab_size)
        cache, exits_BMD = draft.carry
        tree = chain(draft.tokens_BM, draft.drafted_BM)
        passes = count * exit_layer / model.config.num_layers
        return Proposal(tree, exits_BMD, cache, draft.log_q_BMV, passes)

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        exit_layer, last = self.exit_of(model.config), self.num_draft_tokens
        hidden_B1D, cache = _run_first(model, exit_layer, state, proposal.tree.tokens_BM[:, last], nodes.start_B + last)
        exits_BMD = proposal.memory.at[:, last].set(hidden_B1D[:, 0])
        placements = cache.place(nodes.start_B, nodes.ancestors_BMM)
        hidden_BMD, cache = model.run_layers(
            exit_layer,
            model.config.num_layers,
            exits_BMD,
            nodes.positions_BM,
            cache,
            placements,
            state.context_lengths_B,
        )
        hidden_BMD = model.normed(hidden_BMD)
        return Verified(model.logits(hidden_BMD), hidden_BMD, cache)

    def observe(
        self, model: Model, params: Any, state: Any, proposal: Any, verified: Any, draws_BM: Any, walk: Any
    ) -> Any:
        return ()


def _run_first(
    model: Model, exit_layer: int, state: DecodeState, token_B: Int[Array, " B"], position_B: Int[Array, " B"]
) -> tuple[Float[Array, "B 1 D"], Any]:
    """Run the layers before the exit on one token of each row, after all that the cache holds before it."""
    position_B1 = position_B[:, None]
    placements = state.cache.place(position_B, jnp.ones((1, 1, 1), bool))
    hidden_B1D = model.embedded(token_B[:, None], position_B1)
    return model.run_layers(0, exit_layer, hidden_B1D, position_B1, state.cache, placements, state.context_lengths_B)
