"""The interface of every way to decode: propose a tree, let the target verify it, learn from what it drew."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.tree import DraftTree
from jaxinfer.decoding.verify import Walk
from jaxinfer.notation import Params


@dataclass(frozen=True)
class Strategy(ABC):
    """Static and hashable: its fields are its options, and a program is compiled for each value of them.

    ``name`` is what the command line calls it, ``exactness`` what it promises: ``"identical"`` (the tokens of plain
    decoding with the same seed). `headroom` is how many cache slots past a text's end its trees may write,
    `max_depth` how many drafted tokens one step can accept.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    exactness: ClassVar[str] = "identical"

    @property
    @abstractmethod
    def headroom(self) -> int:
        """Cache slots that a step writes past a row's last committed token."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The deepest node that a tree of this strategy can have."""

    @abstractmethod
    def start(self, params: Params, state: DecodeState) -> Any:
        """Return what the strategy remembers between steps, as a pytree, from the state after prefill."""

    @abstractmethod
    def propose(self, params: Params, state: DecodeState, memory: Any) -> tuple[DraftTree, Any]:
        """Return a tree whose node 0 is each row's current token."""

    @abstractmethod
    def observe(self, tree: DraftTree, draws_BM: Any, walk: Walk, memory: Any) -> Any:
        """Return the memory after a step; ``draws_BM`` holds the target's token at every node, taken or not."""


def current_tokens(state: DecodeState) -> Any:
    """Return each row's current token ``[B]``: known, not yet in the cache."""
    return jnp.take_along_axis(state.tokens_BS, state.lengths_B[:, None] - 1, axis=1)[:, 0]
