"""Typical acceptance: take what the target finds plausible, not what it would have drawn (Cai et al., 2401.10774)."""

import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk, is_draft, path_to
from jaxinfer.decoding.trees.tree import DraftTree, depths
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.rows import take_pairs


def accept_typical(
    tree: DraftTree,
    ancestors_BMM: Bool[Array, "B M M"],
    log_p_BMV: Float[Array, "B M V"],
    draws_BM: Int[Array, "B M"],
    max_depth: int,
    epsilon: float,
    delta: float,
) -> Walk:
    """Take the longest path whose every token x has ``p(x) > min(epsilon, delta * exp(-entropy))`` at its parent.

    ``log_p_BMV`` is the target's distribution after each node with the row's sampling transforms, ``draws_BM`` its own
    token there. Of paths of equal length the most probable is taken. At temperature 0 the distribution is the best
    token alone, and this is an exact match.
    """
    p_BMV = jnp.exp(log_p_BMV)
    entropy_BM = -jnp.sum(jnp.where(p_BMV > 0, p_BMV * log_p_BMV, 0), axis=-1)
    least_BM = jnp.minimum(epsilon, delta * jnp.exp(-entropy_BM))
    # Of each node's token at its parent.
    log_p_BM = take_pairs(log_p_BMV, tree.parents_BM, tree.tokens_BM)
    plausible_BM = jnp.exp(log_p_BM) > jnp.take_along_axis(least_BM, tree.parents_BM, axis=1)
    is_root_1M = jnp.arange(tree.tokens_BM.shape[1])[None, :] == 0
    accepted_BM = is_root_1M | (is_draft(tree) & plausible_BM)
    reached_BM = jnp.all(accepted_BM[:, None, :] | ~ancestors_BMM, axis=-1)
    depth_BM = jnp.where(reached_BM, depths(ancestors_BMM), -1)
    score_BM = jnp.sum(jnp.where(ancestors_BMM & ~is_root_1M[:, None], log_p_BM[:, None, :], 0), axis=-1)
    is_deepest_BM = depth_BM == jnp.max(depth_BM, axis=1, keepdims=True)
    best_B = jnp.argmax(jnp.where(is_deepest_BM, score_BM, -jnp.inf), axis=1).astype(jnp.int32)
    path_BM, taken_B = path_to(best_B, ancestors_BMM, max_depth)
    return Walk(path_BM, taken_B, jnp.take_along_axis(draws_BM, best_B[:, None], axis=1)[:, 0])
