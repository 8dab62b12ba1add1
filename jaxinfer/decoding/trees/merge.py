"""Joining draft trees: what two drafters agree on is verified once, and of the rest what is likeliest to be taken."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.trees.tree import DraftTree, ancestors, depths
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.ops.top_k import top_k


class Merged(NamedTuple):
    """One tree of several: its root is theirs, then come the other nodes of each in turn.

    ``places`` holds, for each of them, where its nodes stand in the whole: those of later trees that repeat an earlier
    node stand where that does, and their own place is padding.
    """

    tree: DraftTree
    places: tuple[Int[Array, "B M"], ...]


def merge(trees: Sequence[DraftTree]) -> Merged:
    """Join trees of the same roots; what must not be taken repeats nothing."""
    # Where each tree's nodes stand if none repeats another: all roots in one place.
    own_places, last = [], 0
    for tree in trees:
        past = last + tree.tokens_BM.shape[1]
        own_places.append(np.array([0, *range(last + 1, past)], np.int32))
        last = past - 1
    moved = [tree._replace(parents_BM=jnp.asarray(own)[tree.parents_BM]) for tree, own in zip(trees, own_places)]
    whole = DraftTree(
        *(jnp.concatenate([moved[0][field], *[tree[field][:, 1:] for tree in moved[1:]]], axis=1) for field in range(4))
    )
    index_M = jnp.arange(whole.tokens_BM.shape[1], dtype=jnp.int32)
    place_BM = jnp.where(index_M < trees[0].tokens_BM.shape[1], index_M, _first_of_path(whole))
    is_first_BM = place_BM == index_M
    parents_BM = jnp.take_along_axis(place_BM, whole.parents_BM, axis=1)
    tree = whole._replace(parents_BM=parents_BM, valid_BM=whole.valid_BM & is_first_BM)
    return Merged(tree, tuple(place_BM[:, own] for own in own_places))


def _first_of_path(forest: DraftTree) -> Int[Array, "B M"]:
    """Return for each node the first that the same tokens lead to from the root: itself if it is that."""
    relation_BMM = ancestors(forest.parents_BM)
    depth_BM = depths(relation_BMM)
    counts_BM = forest.valid_BM & forest.acceptable_BM
    is_same_BMM = forest.tokens_BM[:, :, None] == forest.tokens_BM[:, None, :]
    is_same_BMM &= counts_BM[:, :, None] & counts_BM[:, None, :]
    is_same_BMM |= jnp.eye(depth_BM.shape[1], dtype=bool)
    is_beside_BMM = depth_BM[:, :, None] == depth_BM[:, None, :]
    # How often, on the ways to two nodes of one depth, the nodes that stand side by side differ.
    above_BMM = relation_BMM.astype(jnp.float32)
    differs_BMM = (is_beside_BMM & ~is_same_BMM).astype(jnp.float32)
    differences_BMM = above_BMM @ differs_BMM @ above_BMM.swapaxes(1, 2)
    return jnp.argmax(is_beside_BMM & (differences_BMM == 0), axis=2).astype(jnp.int32)


def select(
    tree: DraftTree, ancestors_BMM: Bool[Array, "B M M"], gains_BM: Float[Array, "B M"], count: int, backend: Backend
) -> tuple[DraftTree, Int[Array, "B M"]]:
    """Return the tree of the ``count`` nodes that gain most, and where each node stands in it, -1 where nowhere.

    A node gains no more than its ancestors, so with it they are chosen too. The root always is: what is not a number
    gains nothing.
    """
    gains_BM = jnp.where(jnp.isnan(gains_BM), 0.0, gains_BM).at[:, 0].set(jnp.inf)
    reach_BM = jnp.min(jnp.where(ancestors_BMM, gains_BM[:, None, :], jnp.inf), axis=-1)
    reach_BM = jnp.where(tree.valid_BM, reach_BM, -1.0).at[:, 0].set(jnp.inf)
    _, chosen_BC = top_k(reach_BM, count, backend)
    chosen_BC = jnp.sort(chosen_BC, axis=1)
    is_chosen_BM = set_in_rows(jnp.zeros(tree.valid_BM.shape, bool), chosen_BC, jnp.ones(chosen_BC.shape, bool))
    places_BM = jnp.where(is_chosen_BM, jnp.cumsum(is_chosen_BM, axis=1, dtype=jnp.int32) - 1, -1)
    tokens_BC, parents_BC, valid_BC, acceptable_BC = (jnp.take_along_axis(field, chosen_BC, axis=1) for field in tree)
    parents_BC = jnp.maximum(jnp.take_along_axis(places_BM, parents_BC, axis=1), 0)
    return DraftTree(tokens_BC, parents_BC, valid_BC, acceptable_BC), places_BM
