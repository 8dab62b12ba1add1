"""Drafts of what a grammar leaves no choice about."""

import jax
import jax.numpy as jnp

from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.notation import Array, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.grammar import has_grammars, only_tokens, states_after


def with_forced_tokens(
    tree: DraftTree, arrays: SamplingArrays, states_B: Int[Array, " B"]
) -> tuple[DraftTree, Int[Array, "B M"]]:
    """Return the tree with the one token that may come wherever only one may, and the grammars' states at its nodes.

    Such a draft cannot fail; nodes that only pad get one too. Nodes that are valid and never taken stay. ``states_B``
    are the states at the root.
    """
    num_nodes = tree.tokens_BM.shape[1]
    states_BM = jnp.broadcast_to(states_B[:, None], tree.tokens_BM.shape)
    if num_nodes == 1 or not has_grammars(arrays):
        return tree, states_BM
    may_change_BM = ~tree.valid_BM | tree.acceptable_BM

    def visit(node: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        tokens_BM, valid_BM, acceptable_BM, states_BM = carry
        parent_B1 = jax.lax.dynamic_slice_in_dim(tree.parents_BM, node, 1, axis=1)
        above_B = jnp.take_along_axis(states_BM, parent_B1, axis=1)[:, 0]
        only_B = only_tokens(arrays, above_B)
        valid_B1, token_B1 = (jnp.take_along_axis(nodes_BM, parent_B1, axis=1) for nodes_BM in (valid_BM, tokens_BM))
        goes_on_B = valid_B1[:, 0] & ~(token_B1 == arrays.stop_ids_BE).any(axis=1)
        is_forced_B = (only_B >= 0) & goes_on_B & may_change_BM[:, node]
        token_B = jnp.where(is_forced_B, only_B, tokens_BM[:, node])
        return (
            tokens_BM.at[:, node].set(token_B),
            valid_BM.at[:, node].set(valid_BM[:, node] | is_forced_B),
            acceptable_BM.at[:, node].set(acceptable_BM[:, node] | is_forced_B),
            states_BM.at[:, node].set(states_after(arrays, above_B, token_B)),
        )

    carry = tree.tokens_BM, tree.valid_BM.at[:, 0].set(True), tree.acceptable_BM, states_BM
    tokens_BM, valid_BM, acceptable_BM, states_BM = jax.lax.fori_loop(1, num_nodes, visit, carry)
    tree = tree._replace(
        tokens_BM=tokens_BM, valid_BM=valid_BM.at[:, 0].set(tree.valid_BM[:, 0]), acceptable_BM=acceptable_BM
    )
    return tree, states_BM
