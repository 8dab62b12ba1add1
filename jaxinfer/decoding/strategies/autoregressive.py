"""Plain decoding: the empty drafter. One token a step, and the oracle that every other strategy is held to."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy, current_tokens
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.models.model import Model


@dataclass(frozen=True)
class Autoregressive(Strategy):
    """Propose nothing: the tree is the current token alone."""

    name: ClassVar[str] = "autoregressive"
    description: ClassVar[str] = "plain decoding, one token a step; what every other strategy is compared with"

    @property
    def headroom(self) -> int:
        return 1

    @property
    def max_depth(self) -> int:
        return 0

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        tokens_BM = current_tokens(state)[:, None]
        return Proposal(chain(tokens_BM, jnp.ones_like(tokens_BM, bool)), memory)
