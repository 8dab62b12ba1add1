"""What drafters share whose trees may also grow anew at each step, by what is likeliest."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxinfer.decoding.drafting.tree_drafter import TreeDrafter
from jaxinfer.decoding.trees.dynamic import Beams, Growth, Guess
from jaxinfer.decoding.trees.static import tree_depth
from jaxinfer.notation import Array, Float, Int


@dataclass(frozen=True)
class GrowingDrafter(TreeDrafter):
    """Draft as `TreeDrafter` does or, with ``tree=dynamic:N``, the N likeliest nodes; ``growth`` is such a tree."""

    growth: Growth | None = field(default=None, repr=False)

    @property
    def branches(self) -> bool:
        return self.growth is not None or len(self.paths) > tree_depth(self.paths)

    @property
    def headroom(self) -> int:
        return len(self.paths) + 1 if self.growth is None else self.growth.num_nodes

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths) if self.growth is None else self.growth.max_depth

    @property
    def num_ranks(self) -> int:
        """How many tokens it may guess after one node."""
        return 1 + max(max(path) for path in self.paths) if self.growth is None else self.growth.num_ranks


def guess_by_depth(log_p_BJR: Float[Array, "B J R"], tokens_BJR: Int[Array, "B J R"]) -> Guess:
    """Return what guesses the same after every node of a depth, for `grow` and `follow` of `trees.dynamic`."""

    def guess(depth: int, beams: Beams, _: Any) -> tuple[Any, Any, Any]:
        shape = (*beams.tokens_BW.shape, log_p_BJR.shape[-1])
        log_p_BWR, tokens_BWR = (jnp.broadcast_to(each[:, depth - 1, None], shape) for each in (log_p_BJR, tokens_BJR))
        return log_p_BWR, tokens_BWR, None

    return guess
