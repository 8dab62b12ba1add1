"""Draft trees of what is guessed after each node: along ranks, or grown where guesses are likely.

A tree of ranks is the same whatever drafters think. One that grows from the chances that they give their tokens, here
and now, goes deep where one of them is likely and wide where many are (EAGLE-2, Li et al., 2406.16858).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.trees.pruning import best_nodes
from jaxinfer.decoding.trees.static import MAX_NODES, Paths, all_valid, lay_out, tree_depth
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.top_k import top_k

# `int` refuses texts of thousands of digits.
_COUNT = re.compile(r"[0-9]{1,6}")


class Growth(NamedTuple):
    """How a tree grows: ``num_nodes`` in the end, the root included, ``max_depth`` levels below the root.

    At each level the likeliest ``num_beams`` nodes get children, ``num_ranks`` each.
    """

    num_nodes: int
    max_depth: int

    @property
    def num_beams(self) -> int:
        """A quarter of the nodes, 4 to 10: more of them change what is chosen too seldom to pay for themselves."""
        return min(max(self.num_nodes // 4, 4), 10)

    @property
    def num_ranks(self) -> int:
        """At least as many as there are beams, so that the first level fills them."""
        return max(self.num_beams, 8)

    @property
    def most_nodes(self) -> int:
        """How many nodes there are to choose among, the root included."""
        return 1 + self.num_ranks + (self.max_depth - 1) * self.num_beams * self.num_ranks


class Beams(NamedTuple):
    """The nodes of a level that get children: their tokens, scores, indices, and which of the beams before is whose."""

    tokens_BW: Any
    scores_BW: Any
    nodes_BW: Any
    origins_BW: Any


# From a depth (1 for children of the root), the beams above it and what the depth before passed on, to the
# log-probabilities and tokens of each beam's best children, ``[B, W, R]``, and what the next depth is passed.
Guess = Callable[[int, Beams, Any], tuple[Any, Any, Any]]


def read_growth(name: str) -> int | None:
    """Return how many nodes ``dynamic:N`` asks for; None for the name of another tree."""
    kind, _, count = name.partition(":")
    if kind != "dynamic":
        return None
    num_nodes = int(count) if _COUNT.fullmatch(count) else 0
    if not 2 <= num_nodes <= MAX_NODES:
        raise InvalidOption(f"tree {name!r}: a dynamic tree has 2 to {MAX_NODES} nodes, as in dynamic:16")
    return num_nodes


def check_growth(growth: Growth) -> Growth:
    """Raise InvalidOption for a tree larger than so many levels can grow."""
    if growth.num_nodes > growth.most_nodes:
        raise InvalidOption(
            f"tree dynamic:{growth.num_nodes}: {growth.max_depth} levels grow at most {growth.most_nodes} nodes"
        )
    return growth


def grow(
    growth: Growth, roots_B: Int[Array, " B"], guess: Guess, backend: Backend
) -> tuple[DraftTree, Float[Array, "B M"]]:
    """Return the likeliest nodes of all that grew, as a tree, and the log-probability of each: its path's."""
    batch = roots_B.shape[0]
    zero_B1 = jnp.zeros((batch, 1), jnp.int32)
    tokens, parents, scores = [roots_B[:, None]], [zero_B1], [jnp.zeros((batch, 1), jnp.float32)]
    beams, carried, first = Beams(roots_B[:, None], scores[0], zero_B1, zero_B1), None, 1
    for depth in range(1, growth.max_depth + 1):
        log_p_BWR, tokens_BWR, carried = guess(depth, beams, carried)
        num_ranks = log_p_BWR.shape[-1]
        scores_BC = (beams.scores_BW[..., None] + log_p_BWR.astype(jnp.float32)).reshape(batch, -1)
        tokens_BC, parents_BC = tokens_BWR.reshape(batch, -1), jnp.repeat(beams.nodes_BW, num_ranks, axis=1)
        best_BW, places_BW = top_k(scores_BC, min(growth.num_beams, scores_BC.shape[1]), backend)
        chosen_BW = jnp.take_along_axis(tokens_BC, places_BW, axis=1)
        beams = Beams(chosen_BW, best_BW, first + places_BW, places_BW // num_ranks)
        for parts, level_BC in zip((tokens, parents, scores), (tokens_BC, parents_BC, scores_BC)):
            parts.append(level_BC)
        first += scores_BC.shape[1]
    tokens_BC, parents_BC, scores_BC = (jnp.concatenate(parts, axis=1) for parts in (tokens, parents, scores))
    kept_BM = best_nodes(scores_BC, growth.num_nodes, backend)
    tokens_BM, parents_BM, scores_BM = (
        jnp.take_along_axis(values_BC, kept_BM, axis=1) for values_BC in (tokens_BC, parents_BC, scores_BC)
    )
    is_parent_BMM = kept_BM[:, None, :] == parents_BM[:, :, None]
    all_BM = jnp.ones(kept_BM.shape, bool)
    tree = DraftTree(tokens_BM, jnp.argmax(is_parent_BMM, axis=-1).astype(jnp.int32), all_BM, all_BM)
    return tree, scores_BM


def follow(paths: Paths, roots_B: Int[Array, " B"], guess: Guess) -> tuple[DraftTree, Float[Array, "B M"]]:
    """Return the tree of these ranks, each among what is guessed after the node above, and `grow`'s log-probabilities.

    It is numbered as `lay_out` does.
    """
    layout = lay_out(paths)
    tokens_BM, scores_BM = roots_B[:, None], jnp.zeros((roots_B.shape[0], 1), jnp.float32)
    carried, parents_before = None, np.zeros(1, np.int32)
    for depth in range(1, tree_depth(paths) + 1):
        level = np.flatnonzero(layout.depths_M == depth)
        parents, parent_of = np.unique(layout.parents_M[level], return_inverse=True)
        origins = np.searchsorted(parents_before, layout.parents_M[parents])
        nodes_BW, origins_BW = (
            jnp.broadcast_to(jnp.asarray(each, jnp.int32), (roots_B.shape[0], len(parents)))
            for each in (parents, origins)
        )
        beams = Beams(tokens_BM[:, parents], scores_BM[:, parents], nodes_BW, origins_BW)
        log_p_BWR, tokens_BWR, carried = guess(depth, beams, carried)
        ranks = layout.ranks_M[level]
        tokens_BM = jnp.concatenate([tokens_BM, tokens_BWR[:, parent_of, ranks]], axis=1)
        above_BM = scores_BM[:, layout.parents_M[level]]
        scores_BM = jnp.concatenate([scores_BM, above_BM + log_p_BWR[:, parent_of, ranks]], axis=1)
        parents_before = parents
    return all_valid(layout, tokens_BM), scores_BM
