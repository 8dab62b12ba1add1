"""Cutting a draft tree down before it is verified: to the nodes that a cheaper look speaks for."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.trees.static import TreeLayout
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows import take_pairs
from jaxinfer.ops.top_k import top_k


def path_scores(
    layout: TreeLayout, tokens_BM: Int[Array, "B M"], logits_BIV: Float[Array, "B I V"], least: float
) -> Float[Array, "B M"]:
    """Return the log-probability of the path to each node, no child's above its parent's.

    ``logits_BIV`` guess the token after each node that has children, in their order. A transition less likely than
    ``least`` makes it minus infinity.
    """
    _, parent_of = np.unique(layout.parents_M, return_inverse=True)
    totals_BI = jax.nn.logsumexp(logits_BIV, axis=-1)
    parents_BM = jnp.broadcast_to(jnp.asarray(parent_of), tokens_BM.shape)
    steps_BM = jnp.minimum(take_pairs(logits_BIV, parents_BM, tokens_BM) - totals_BI[:, parent_of], 0.0)
    steps_BM = jnp.where(jnp.exp(steps_BM) >= least, steps_BM, -jnp.inf)
    scores_BM = jnp.zeros(tokens_BM.shape, steps_BM.dtype)
    for depth in range(1, int(layout.depths_M.max()) + 1):
        level = np.flatnonzero(layout.depths_M == depth)
        scores_BM = scores_BM.at[:, level].set(scores_BM[:, layout.parents_M[level]] + steps_BM[:, level])
    return scores_BM


def best_nodes(scores_BM: Float[Array, "B M"], count: int, backend: Backend) -> Int[Array, "B C"]:
    """Return the root and the nodes of the best other scores, ``count`` together, in ascending order.

    A node's parent is among them, as it scores no less and, at the same score, comes first.
    """
    _, best_BC = top_k(scores_BM[:, 1:], count - 1, backend)
    root_B1 = jnp.zeros((scores_BM.shape[0], 1), best_BC.dtype)
    return jnp.concatenate([root_B1, jnp.sort(best_BC, axis=1) + 1], axis=1)


def kept_tree(tree: DraftTree, kept_BC: Int[Array, "B C"], valid_BM: Bool[Array, "B M"]) -> DraftTree:
    """Return a tree of the kept nodes alone, of which only those that ``valid_BM`` marks are drafts."""

    def kept(values_BM: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values_BM, kept_BC, axis=1)

    is_parent_BCC = kept_BC[:, None, :] == kept(tree.parents_BM)[:, :, None]
    parents_BC = jnp.argmax(is_parent_BCC, axis=-1).astype(jnp.int32)
    valid_BC = kept(tree.valid_BM & valid_BM)
    return DraftTree(kept(tree.tokens_BM), parents_BC, valid_BC, valid_BC)
