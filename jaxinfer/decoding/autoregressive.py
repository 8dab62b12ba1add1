"""Plain decoding: the empty drafter. One token a step, and the oracle that every other strategy is held to."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Strategy, current_tokens
from jaxinfer.decoding.tree import DraftTree, chain
from jaxinfer.decoding.verify import Walk
from jaxinfer.notation import Params


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

    def start(self, params: Params, state: DecodeState) -> Any:
        return ()

    def propose(self, params: Params, state: DecodeState, memory: Any) -> tuple[DraftTree, Any]:
        tokens_BM = current_tokens(state)[:, None]
        return chain(tokens_BM, jnp.ones_like(tokens_BM, bool)), memory

    def observe(self, tree: DraftTree, draws_BM: Any, walk: Walk, memory: Any) -> Any:
        return memory
