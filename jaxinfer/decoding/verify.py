"""Which path of a draft tree the target's own draws take."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.tree import DraftTree
from jaxinfer.notation import Array, Int


class Walk(NamedTuple):
    """The accepted path.

    ``path_BM`` int32 are node indices from the root on, as many as the greatest depth + 1; ``taken_B`` how many of them
    count, the root included, so at least 1. Entries past them repeat the last.
    """

    path_BM: Any
    taken_B: Any


def match(tree: DraftTree, draws_BM: Int[Array, "B M"], max_depth: int) -> Walk:
    """Follow the target: from the root on, step to the child whose token is what the target drew at its parent.

    ``draws_BM`` is the target's token at every node; no node stands deeper than ``max_depth``. Of children with equal
    tokens the one of lowest index is taken.
    """
    nodes = tree.tokens_BM.shape[1]
    drawn_at_parent_BM = jnp.take_along_axis(draws_BM, tree.parents_BM, axis=1)
    is_draft_BM = tree.valid_BM & tree.acceptable_BM & (jnp.arange(nodes) > 0)
    matches_BM = is_draft_BM & (tree.tokens_BM == drawn_at_parent_BM)

    def descend(carry, _):
        current_B, alive_B, taken_B = carry
        follows_BM = matches_BM & (tree.parents_BM == current_B[:, None])
        alive_B = alive_B & follows_BM.any(axis=1)
        current_B = jnp.where(alive_B, jnp.argmax(follows_BM, axis=1).astype(jnp.int32), current_B)
        return (current_B, alive_B, taken_B + alive_B), current_B

    root_B = jnp.zeros(draws_BM.shape[:1], jnp.int32)
    carry = (root_B, jnp.ones_like(root_B, bool), jnp.ones_like(root_B))
    (_, _, taken_B), path_MB = jax.lax.scan(descend, carry, None, length=max_depth)
    return Walk(jnp.concatenate([root_B[:, None], path_MB.T], axis=1), taken_B)
