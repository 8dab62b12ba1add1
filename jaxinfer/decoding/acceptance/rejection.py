"""Rejection sampling of draft trees: the target's distribution, from drafts of another.

Leviathan et al., 2211.17192, and Chen et al., 2302.01318, for chains; for several children of a node each is tried on
what the ones before it have left (Miao et al., 2305.09781), so equal siblings are handled too.
"""

import jax
import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk, is_draft, path_to
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.draw import best_token
from jaxinfer.sampling.noise import ROLE_ACCEPT, ROLE_RESIDUAL, gumbel, role, uniform, vocabulary_ids


def reject(
    tree: DraftTree,
    ancestors_BMM: Bool[Array, "B M M"],
    positions_BM: Int[Array, "B M"],
    log_p_BMV: Float[Array, "B M V"],
    log_q_BMV: Float[Array, "B M V"],
    arrays: SamplingArrays,
    max_depth: int,
    level: int = 0,
    has_distinct_siblings: bool = False,
) -> Walk:
    """Accept each child with probability min(1, p / q), else go on with the rest of p that q does not cover.

    ``log_p_BMV`` is the target's distribution after each node and ``log_q_BMV`` the one that the node's children were
    drawn from, both with the row's own sampling transforms; with ``has_distinct_siblings`` each is drawn from what the
    ones before it have left of that (2402.14160). ``positions_BM`` are the nodes' own. Noise has the accept
    and the residual role of ``level``: sharing the drafts' would bias the result.
    """
    batch, nodes, vocab_size = log_p_BMV.shape
    uniform_BM = _accept_noise(positions_BM, nodes, arrays, level)
    may_take_BM = is_draft(tree)

    def visit(carry, node):
        current_B, left_BV, untried_BV = carry
        token_B1 = tree.tokens_BM[:, node, None]
        q_BV = jnp.exp(jnp.take_along_axis(log_q_BMV, current_B[:, None, None], axis=1)[:, 0])
        is_token_BV = vocabulary_ids(vocab_size) == token_B1
        if has_distinct_siblings:
            q_BV = _one_of_untried(q_BV, untried_BV, is_token_BV)
        q_B, p_B = (jnp.take_along_axis(share_BV, token_B1, axis=1)[:, 0] for share_BV in (q_BV, left_BV))
        is_child_B = may_take_BM[:, node] & (tree.parents_BM[:, node] == current_B)
        accepts_B = uniform_BM[:, node] * q_B < p_B
        takes_B, refuses_B = is_child_B & accepts_B, is_child_B & ~accepts_B
        left_BV = jnp.where(refuses_B[:, None], _residual(left_BV, q_BV), left_BV)
        left_BV = jnp.where(takes_B[:, None], jnp.exp(log_p_BMV[:, node]), left_BV)
        untried_BV = takes_B[:, None] | (untried_BV & ~(refuses_B[:, None] & is_token_BV))
        return (jnp.where(takes_B, node, current_B), left_BV, untried_BV), None

    # A child stands after its parent, and the children of one node are tried in their order.
    carry = (jnp.zeros((batch,), jnp.int32), jnp.exp(log_p_BMV[:, 0]), jnp.ones((batch, vocab_size), bool))
    (last_B, left_BV, _), _ = jax.lax.scan(visit, carry, jnp.arange(1, nodes, dtype=jnp.int32))
    path_BM, taken_B = path_to(last_B, ancestors_BMM, max_depth)
    next_position_B = jnp.take_along_axis(positions_BM, last_B[:, None], axis=1)[:, 0] + 1
    noise_BV = gumbel(arrays.key_data_B2, next_position_B, role(ROLE_RESIDUAL, level), vocabulary_ids(vocab_size))
    scores_BV = jnp.log(left_BV) + jnp.where(arrays.samples_B()[:, None], noise_BV, 0)
    return Walk(path_BM, taken_B, best_token(scores_BV))


def _one_of_untried(
    q_BV: Float[Array, "B V"], untried_BV: Bool[Array, "B V"], is_token_BV: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """Return what a sibling was drawn from after others: what they left or, where that is nothing, itself alone.

    Then it was no draw, but the next in order: so at temperature 0, and where sampling keeps fewer tokens than a node
    has children.
    """
    q_BV = jnp.where(untried_BV, q_BV, 0)
    mass_B1 = jnp.sum(q_BV, axis=-1, keepdims=True)
    return jnp.where(mass_B1 > 1e-6, q_BV / jnp.maximum(mass_B1, 1e-6), is_token_BV.astype(q_BV.dtype))


def _residual(left_BV: Float[Array, "B V"], q_BV: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Return the normalised part of what is left that q does not cover; all of it where that is nothing.

    Where p and q agree, rounding alone can refuse a draft, and then any of p's tokens is right.
    """
    rest_BV = jnp.maximum(left_BV - q_BV, 0)
    mass_B1 = jnp.sum(rest_BV, axis=-1, keepdims=True)
    return jnp.where(mass_B1 > 1e-9, rest_BV / jnp.maximum(mass_B1, 1e-9), left_BV)


def _accept_noise(positions_BM: Array, nodes: int, arrays: SamplingArrays, level: int) -> Float[Array, "B M"]:
    """Draw each node's uniform number, by its position and, among siblings, its index."""
    accept = role(ROLE_ACCEPT, level)
    lanes_BMM = uniform(arrays.key_data_B2[:, None], positions_BM, accept, vocabulary_ids(nodes))
    return jnp.diagonal(lanes_BMM, axis1=1, axis2=2)
