"""What a part of a sum is shown of a step: its own nodes, numbered as it proposed them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk, path_to
from jaxinfer.decoding.strategy import Proposal, Strategy, Verified
from jaxinfer.decoding.trees.tree import DraftTree, ancestors, depths
from jaxinfer.notation import Array, Bool, Int
from jaxinfer.ops.rows import take_rows


class PartView(NamedTuple):
    """The arguments of a part's `observe`, and which of its nodes are on the path that was taken.

    What a part does not read is never computed.
    """

    proposal: Proposal
    verified: Verified
    draws_BM: Int[Array, "B M"]
    walk: Walk
    is_taken_BM: Bool[Array, "B M"]


def part_view(
    part: Strategy,
    draft: Proposal,
    places_BM: Int[Array, "B M"],
    tree: DraftTree,
    verified: Verified,
    draws_BM: Any,
    walk: Walk,
    verifies: bool,
) -> PartView:
    """Return a part's view of what became of the sum's ``tree``; ``places_BM`` are its nodes' places there, or -1.

    A node that found no place has no answer. It is not valid, and reads as the root once more, so that a part that
    learns from nodes without asking which are valid learns what is true of the root. ``verifies`` tells whether the
    part's own `forward` has run.
    """
    at_BM = jnp.maximum(places_BM, 0)
    logits_BMV, hidden_BMD, own_draws_BM, tokens_BM, is_on_path_BM = (
        take_rows(values_BMX, at_BM)
        for values_BMX in (verified.logits_BMV, verified.hidden_BMD, draws_BM, tree.tokens_BM, _on_path(walk, draws_BM))
    )
    valid_BM = draft.tree.valid_BM & (places_BM >= 0)
    proposal = draft._replace(tree=draft.tree._replace(tokens_BM=tokens_BM, valid_BM=valid_BM))
    aux = jax.tree.map(lambda values: take_rows(values, at_BM), verified.aux) if verifies else None
    last = verified.last if verifies else verified.last._replace(aux=None)
    seen = verified._replace(logits_BMV=logits_BMV, hidden_BMD=hidden_BMD, aux=aux, last=last)
    is_taken_BM = valid_BM & is_on_path_BM
    own_walk = _own_walk(draft.tree, is_taken_BM, own_draws_BM, part.max_depth)
    return PartView(proposal, seen, own_draws_BM, own_walk, is_taken_BM)


def _on_path(walk: Walk, draws_BM: Int[Array, "B M"]) -> Bool[Array, "B M"]:
    """Return which nodes a walk takes."""
    nodes_M, steps_J = jnp.arange(draws_BM.shape[1]), jnp.arange(walk.path_BM.shape[1])
    is_taken_BJ = steps_J < walk.taken_B[:, None]
    return ((walk.path_BM[:, :, None] == nodes_M) & is_taken_BJ[:, :, None]).any(axis=1)


def _own_walk(tree: DraftTree, is_taken_BM: Any, draws_BM: Int[Array, "B M"], max_depth: int) -> Walk:
    """Return the path to the deepest node of a tree that was taken, and the target's token after it."""
    relation_BMM = ancestors(tree.parents_BM)
    is_reached_BM = jnp.all(is_taken_BM[:, None, :] | ~relation_BMM, axis=-1)
    last_B = jnp.argmax(jnp.where(is_reached_BM, depths(relation_BMM), 0), axis=1).astype(jnp.int32)
    path_BM, taken_B = path_to(last_B, relation_BMM, max_depth)
    return Walk(path_BM, taken_B, take_rows(draws_BM, last_B[:, None])[:, 0])
