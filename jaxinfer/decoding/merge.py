"""Joining draft trees: what two drafters agree on is verified once, and of the rest what is likeliest to be taken."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.tree import DraftTree
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.ops.top_k import top_k


class Merged(NamedTuple):
    """One tree of several: its root is theirs, then come the other nodes of each in turn.

    ``places`` holds, for each of them, where its nodes stand in the whole: those that repeat one of an earlier tree
    stand where that does, and their own place is padding.
    """

    tree: DraftTree
    places: tuple[Int[Array, "B M"], ...]


def merge(trees: Sequence[DraftTree]) -> Merged:
    """Join trees of the same roots."""
    joined = [jnp.concatenate([trees[0][field], *[tree[field][:, 1:] for tree in trees[1:]]], 1) for field in range(4)]
    whole = DraftTree(*joined)
    batch, first_size = trees[0].tokens_BM.shape
    places = [jnp.broadcast_to(jnp.arange(first_size, dtype=jnp.int32), (batch, first_size))]
    offset = first_size - 1
    for tree in trees[1:]:
        whole, places_BM = _merge_into(whole, tree, offset)
        places.append(places_BM)
        offset += tree.tokens_BM.shape[1] - 1
    return Merged(whole, tuple(places))


def _merge_into(whole: DraftTree, tree: DraftTree, offset: int) -> tuple[DraftTree, Int[Array, "B M"]]:
    """Put a tree's nodes, the root apart, at ``offset`` plus their index, except where an earlier node is equal."""
    batch, size = tree.tokens_BM.shape
    index_M = jnp.arange(whole.tokens_BM.shape[1])

    def visit(carry, node):
        whole, places_BM = carry
        own = offset + node
        parent_B = jnp.take_along_axis(places_BM, tree.parents_BM[:, node, None], axis=1)[:, 0]
        is_equal_BM = (whole.tokens_BM == tree.tokens_BM[:, node, None]) & (whole.parents_BM == parent_B[:, None])
        is_equal_BM &= whole.valid_BM & whole.acceptable_BM & (index_M > 0) & (index_M < own)
        repeats_B = is_equal_BM.any(axis=1) & tree.valid_BM[:, node] & tree.acceptable_BM[:, node]
        place_B = jnp.where(repeats_B, jnp.argmax(is_equal_BM, axis=1).astype(jnp.int32), own)
        whole = whole._replace(
            parents_BM=whole.parents_BM.at[:, own].set(parent_B),
            valid_BM=whole.valid_BM.at[:, own].set(tree.valid_BM[:, node] & ~repeats_B),
        )
        return (whole, places_BM.at[:, node].set(place_B)), None

    carry = (whole, jnp.zeros((batch, size), jnp.int32))
    (whole, places_BM), _ = jax.lax.scan(visit, carry, jnp.arange(1, size, dtype=jnp.int32))
    return whole, places_BM


def select(
    tree: DraftTree, ancestors_BMM: Bool[Array, "B M M"], gains_BM: Float[Array, "B M"], count: int, backend: Backend
) -> tuple[DraftTree, Int[Array, "B M"]]:
    """Return the tree of the ``count`` nodes that gain most, and where each node stands in it, -1 where nowhere.

    A node gains no more than its ancestors, so with it they are chosen too. The root always is.
    """
    gains_BM = gains_BM.at[:, 0].set(jnp.inf)
    reach_BM = jnp.min(jnp.where(ancestors_BMM, gains_BM[:, None, :], jnp.inf), axis=-1)
    reach_BM = jnp.where(tree.valid_BM, reach_BM, -1.0).at[:, 0].set(jnp.inf)
    _, chosen_BC = top_k(reach_BM, count, backend)
    chosen_BC = jnp.sort(chosen_BC, axis=1)
    is_chosen_BM = set_in_rows(jnp.zeros(tree.valid_BM.shape, bool), chosen_BC, jnp.ones(chosen_BC.shape, bool))
    places_BM = jnp.where(is_chosen_BM, jnp.cumsum(is_chosen_BM, axis=1, dtype=jnp.int32) - 1, -1)
    tokens_BC, parents_BC, valid_BC, acceptable_BC = (jnp.take_along_axis(field, chosen_BC, axis=1) for field in tree)
    parents_BC = jnp.maximum(jnp.take_along_axis(places_BM, parents_BC, axis=1), 0)
    return DraftTree(tokens_BC, parents_BC, valid_BC, acceptable_BC), places_BM
