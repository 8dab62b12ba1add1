"""LayerSkip: the model's first layers draft, all of them verify (Elhoushi et al., 2404.16710)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.drafting.chain import draft_chain
from jaxinfer.decoding.fixed_rows import step_nodes
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Nodes, Proposal, Strategy, Target, Verified
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.masks import causal_ancestors


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
        shape = state.lengths_B.shape[0], step_nodes(self, count + 1, model.decoder.backend)
        exits_BMD = jnp.zeros((*shape, model.config.model_dim), model.decoder.backend.compute_dtype)

        def next_logits(token_B: Int[Array, " B"], index: Int[Array, ""], carry: Any) -> tuple[Array, Any]:
            cache, tokens_BM, exits_BMD = carry
            tokens_BM = tokens_BM.at[:, index].set(token_B)
            exits_BMD, cache = self._run_first(model, state._replace(cache=cache), tokens_BM, index, exits_BMD)
            hidden_B1D = jax.lax.dynamic_slice_in_dim(exits_BMD, index, 1, axis=1)
            return model.logits(model.normed(hidden_B1D))[:, 0], (cache, tokens_BM, exits_BMD)

        carry = (state.cache, jnp.zeros(shape, jnp.int32), exits_BMD)
        draft = draft_chain(state, next_logits, carry, count, count, self.verify, model.config.vocab_size)
        cache, _, exits_BMD = draft.carry
        tree = chain(draft.tokens_BM, draft.drafted_BM)
        passes = count * exit_layer / model.config.num_layers
        return Proposal(tree, exits_BMD, cache, draft.log_q_BMV, passes)

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        exit_layer, last = self.exit_of(model.config), jnp.int32(self.num_draft_tokens)
        exits_BMD, cache = self._run_first(model, state, proposal.tree.tokens_BM, last, proposal.memory)
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
        self,
        model: Model,
        state: DecodeState,
        tokens_BM: Int[Array, "B M"],
        index: Int[Array, ""],
        exits_BMD: Float[Array, "B M D"],
    ) -> tuple[Float[Array, "B M D"], LayeredCache]:
        """Run the layers before the exit on node ``index``, and return the exits with that node's.

        With fixed rows they run on all nodes once more, as a step does: their cache is the one that plain decoding
        writes. What stands after ``index`` is written over later.
        """
        is_whole = self.fills_steps and model.decoder.backend.fixed_rows > 1
        first, size = (jnp.int32(0), tokens_BM.shape[1]) if is_whole else (index, 1)
        start_B = state.lengths_B - 1 + first
        positions_BT = start_B[:, None] + jnp.arange(size, dtype=start_B.dtype)
        placements = state.cache.place(start_B, causal_ancestors(size)[None])
        hidden_BTD = model.embedded(jax.lax.dynamic_slice_in_dim(tokens_BM, first, size, axis=1), positions_BT)
        hidden_BTD, cache = model.run_layers(
            0, self.exit_of(model.config), hidden_BTD, positions_BT, state.cache, placements, state.context_lengths_B
        )
        return jax.lax.dynamic_update_slice_in_dim(exits_BMD, hidden_BTD, first, axis=1), cache
