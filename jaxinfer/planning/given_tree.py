"""A step that only verifies; its tree is given."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, current_tokens
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.models.model import Model


@dataclass(frozen=True)
class GivenTree(Strategy):
    """Verify a given tree of ``nodes`` nodes, the current token included; drafting costs nothing.

    The tree's shape is data, so one compiled program verifies any tree.
    """

    name: ClassVar[str] = "given_tree"
    description: ClassVar[str] = "verify a tree that is at hand"

    nodes: int = 2

    def __post_init__(self) -> None:
        check_range(self, "nodes", 2, 1024)

    @property
    def headroom(self) -> int:
        return self.nodes

    @property
    def max_depth(self) -> int:
        return self.nodes - 1

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> DraftTree:
        shape = (state.lengths_B.shape[0], self.nodes)
        parents_BM = jnp.broadcast_to(jnp.maximum(jnp.arange(self.nodes, dtype=jnp.int32) - 1, 0), shape)
        return DraftTree(jnp.zeros(shape, jnp.int32), parents_BM, jnp.ones(shape, bool), jnp.ones(shape, bool))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: DraftTree) -> Proposal:
        tokens_BM = memory.tokens_BM.at[:, 0].set(current_tokens(state))
        return Proposal(memory._replace(tokens_BM=tokens_BM), memory)
