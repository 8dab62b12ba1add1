"""Which path of a draft tree the target takes, by its own draws.

Every way of accepting returns a `Walk`: ``match`` here, which gives the tokens of plain decoding whatever the drafts,
``rejection`` (`jaxinfer.decoding.acceptance.rejection`), which gives its distribution, and ``typical``
(`jaxinfer.decoding.acceptance.typical`), which gives neither and says so.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.notation import Array, Bool, Int


class Walk(NamedTuple):
    """The accepted path and what follows it.

    ``path_BM`` int32 are node indices from the root on, as many as the greatest depth + 1; ``taken_B`` how many of them
    count, the root included, so at least 1. Entries past them repeat the last. ``next_B`` int32 is the token after the
    last taken node: the one that no draft gave.
    """

    path_BM: Any
    taken_B: Any
    next_B: Any


def match(tree: DraftTree, draws_BM: Int[Array, "B M"], max_depth: int) -> Walk:
    """Follow the target: from the root on, step to the child whose token is what the target drew at its parent.

    ``draws_BM`` is the target's token at every node; no node stands deeper than ``max_depth``. Of children with equal
    tokens the one of lowest index is taken.
    """
    drawn_at_parent_BM = jnp.take_along_axis(draws_BM, tree.parents_BM, axis=1)
    matches_BM = is_draft(tree) & (tree.tokens_BM == drawn_at_parent_BM)

    def descend(carry, _):
        current_B, alive_B, taken_B = carry
        follows_BM = matches_BM & (tree.parents_BM == current_B[:, None])
        alive_B = alive_B & follows_BM.any(axis=1)
        current_B = jnp.where(alive_B, jnp.argmax(follows_BM, axis=1).astype(jnp.int32), current_B)
        return (current_B, alive_B, taken_B + alive_B), current_B

    root_B = jnp.zeros(draws_BM.shape[:1], jnp.int32)
    carry = (root_B, jnp.ones_like(root_B, bool), jnp.ones_like(root_B))
    (last_B, _, taken_B), path_MB = jax.lax.scan(descend, carry, None, length=max_depth)
    next_B = jnp.take_along_axis(draws_BM, last_B[:, None], axis=1)[:, 0]
    return Walk(jnp.concatenate([root_B[:, None], path_MB.T], axis=1), taken_B, next_B)


def is_draft(tree: DraftTree) -> Bool[Array, "B M"]:
    """Return which nodes are guesses that may be taken: not the root, padding, or a window."""
    return tree.valid_BM & tree.acceptable_BM & (jnp.arange(tree.tokens_BM.shape[1])[None, :] > 0)


def path_to(node_B: Int[Array, " B"], ancestors_BMM: Bool[Array, "B M M"], max_depth: int) -> tuple[Array, Array]:
    """Return the path from the root to a node, and how many nodes it has; the last is repeated to ``max_depth`` + 1."""
    on_path_BM = jnp.take_along_axis(ancestors_BMM, node_B[:, None, None], axis=1)[:, 0]
    depth_BM = jnp.cumsum(on_path_BM, axis=1, dtype=jnp.int32) - 1
    step_1J1 = jnp.minimum(jnp.arange(max_depth + 1)[None, :, None], jnp.max(depth_BM, axis=1)[:, None, None])
    path_BJ = jnp.argmax(on_path_BM[:, None, :] & (depth_BM[:, None, :] == step_1J1), axis=-1).astype(jnp.int32)
    return path_BJ, depth_BM[:, -1] + 1


def emitted_tokens(tree: DraftTree, walk: Walk) -> Int[Array, "B M"]:
    """Return the tokens that a walk gives: those of its taken nodes after the root, then the next one."""
    along_BM = jnp.take_along_axis(tree.tokens_BM, walk.path_BM, axis=1)
    shifted_BM = jnp.concatenate([along_BM[:, 1:], walk.next_B[:, None]], axis=1)
    is_last_BM = jnp.arange(along_BM.shape[1])[None, :] >= walk.taken_B[:, None] - 1
    return jnp.where(is_last_BM, walk.next_B[:, None], shifted_BM)
