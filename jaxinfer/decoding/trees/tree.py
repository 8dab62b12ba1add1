"""A draft tree: what a strategy proposes and one forward pass of the target verifies."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Int


class DraftTree(NamedTuple):
    """M nodes a row; node 0 is the row's current token, every other node a guess of what follows its parent.

    ``tokens_BM`` int32; ``parents_BM`` int32, a parent's index smaller than its child's (node 0's own is ignored);
    ``valid_BM`` bool, false for nodes that only pad the shape and for all descendants of such; a valid node that
    ``acceptable_BM`` marks false is computed but never taken (the window of lookahead decoding).
    """

    tokens_BM: Any
    parents_BM: Any
    valid_BM: Any
    acceptable_BM: Any


def chain(tokens_BM: Int[Array, "B M"], valid_BM: Bool[Array, "B M"]) -> DraftTree:
    """Build the tree in which every node follows the one before it."""
    parents_M = jnp.maximum(jnp.arange(tokens_BM.shape[1], dtype=jnp.int32) - 1, 0)
    return DraftTree(tokens_BM, jnp.broadcast_to(parents_M, tokens_BM.shape), valid_BM, valid_BM)


def ancestors(parents_BM: Int[Array, "B M"]) -> Bool[Array, "B M M"]:
    """Return who descends from whom: ``[b, i, j]`` is true where node j is i or an ancestor of i."""
    nodes = parents_BM.shape[1]
    relation = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parents_BM.shape, nodes))
    if nodes == 1:
        return relation
    # A node's parent stands before it, so squaring "self or parent" often enough reaches every ancestor.
    is_parent = jnp.arange(nodes)[None, None, :] == parents_BM[:, :, None]
    relation = relation | is_parent.at[:, 0].set(False)
    for _ in range((nodes - 1).bit_length()):
        relation = (relation.astype(jnp.float32) @ relation.astype(jnp.float32)) > 0
    return relation


def depths(ancestors_BMM: Bool[Array, "B M M"]) -> Int[Array, "B M"]:
    """Return each node's distance from the root."""
    return jnp.sum(ancestors_BMM, axis=-1, dtype=jnp.int32) - 1
