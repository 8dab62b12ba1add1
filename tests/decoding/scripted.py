"""Drafters that know the text before it is written, and lie where they are told to."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, current_tokens
from jaxinfer.decoding.trees.tree import DraftTree, chain
from jaxinfer.models.model import Model
from jaxinfer.notation import Array


@dataclass(frozen=True)
class Chain(Strategy):
    """Draft ``depth`` tokens of each row's recorded text; from depth ``lies_from`` on each is off by one.

    ``validity`` is ``"valid"``, or ``"padding"`` and ``"window"`` for nodes that are not to be taken.
    """

    name: ClassVar[str] = "scripted-chain"

    texts: tuple[tuple[int, ...], ...] = ()
    depth: int = 3
    lies_from: int = 99
    validity: str = "valid"

    @property
    def headroom(self) -> int:
        return self.depth + 1

    @property
    def branches(self) -> bool:
        return False

    @property
    def max_depth(self) -> int:
        return self.depth

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Any:
        return jnp.int32(0)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        guesses_BM = recorded(self.texts, state, self.depth)
        lie_M = (jnp.arange(1, self.depth + 1) >= self.lies_from).astype(jnp.int32)
        tokens_BM = jnp.concatenate([current_tokens(state)[:, None], guesses_BM + lie_M[None, :]], axis=1)
        is_root_BM = jnp.broadcast_to(jnp.arange(self.depth + 1)[None, :] == 0, tokens_BM.shape)
        tree = chain(tokens_BM, is_root_BM if self.validity == "padding" else jnp.ones_like(is_root_BM))
        return Proposal(tree._replace(acceptable_BM=is_root_BM) if self.validity == "window" else tree, memory + 1)


@dataclass(frozen=True)
class Branches(Chain):
    """Draft two children at every depth, the right one second, and below each wrong one what would come next."""

    name: ClassVar[str] = "scripted-branches"

    @property
    def headroom(self) -> int:
        return 1 + 3 * self.depth

    @property
    def branches(self) -> bool:
        return True

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        right_BM = recorded(self.texts, state, self.depth + 1)
        tokens, parents = [current_tokens(state)], [0]
        parent = 0
        for depth in range(self.depth):
            wrong, right = len(tokens), len(tokens) + 1
            tokens += [right_BM[:, depth] + 1, right_BM[:, depth]]
            parents += [parent, parent]
            if depth + 1 < self.depth:
                tokens.append(right_BM[:, depth + 1])
                parents.append(wrong)
            parent = right
        tokens_BM = jnp.stack(tokens, axis=1)
        parents_BM = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None, :], tokens_BM.shape)
        all_BM = jnp.ones(tokens_BM.shape, bool)
        return Proposal(DraftTree(tokens_BM, parents_BM, all_BM, all_BM), memory)


def recorded(texts: tuple[tuple[int, ...], ...], state: DecodeState, count: int) -> Array:
    """Return the recorded tokens that follow each row's text; zeros past the end of the record."""
    longest = max(len(text) for text in texts) + state.tokens_BS.shape[1] + count
    table_BS = np.zeros((state.tokens_BS.shape[0], longest), np.int32)
    for row, text in enumerate(texts):
        table_BS[row, : len(text)] = text
    places_BM = state.lengths_B[:, None] + jnp.arange(count)[None, :]
    return jnp.take_along_axis(jnp.asarray(table_BS), places_BM, axis=1)
