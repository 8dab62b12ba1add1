"""Jacobi decoding: guess several tokens, and let each pass correct them all (Santilli et al., 2305.10427)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Verified, current_tokens
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int


@dataclass(frozen=True)
class Jacobi(Strategy):
    """Draft what the target drew, in the pass before, after guesses that were wrong.

    Every pass fixes at least one token, and the guesses behind it are those of the last iteration. The first guesses
    are the prompt's last tokens.
    """

    name: ClassVar[str] = "jacobi"
    description: ClassVar[str] = "draft the target's own answers to the guesses of the pass before"

    num_draft_tokens: int = 8

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 128)

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def branches(self) -> bool:
        return False

    @property
    def needs_every_node(self) -> bool:
        return True

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Int[Array, "B J"]:
        back_J = jnp.arange(self.num_draft_tokens, 0, -1)
        places_BJ = jnp.maximum(state.prompt_lengths_B[:, None] - back_J[None, :], 0)
        return jnp.take_along_axis(state.tokens_BS, places_BJ, axis=1)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Int[Array, "B J"]) -> Proposal:
        tokens_BM = jnp.concatenate([current_tokens(state)[:, None], memory], axis=1)
        return Proposal(chain(tokens_BM, jnp.ones_like(tokens_BM, bool)), memory)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Int[Array, "B J"]:
        # The draw at node i is a guess for i + 1 places after the old current token; the new one is depth + 1 places
        # on, and others' drafts may have brought it there.
        places_BJ = verified.last.depth_B[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None, :]
        return jnp.take_along_axis(draws_BM, jnp.minimum(places_BJ, draws_BM.shape[1] - 1), axis=1)
