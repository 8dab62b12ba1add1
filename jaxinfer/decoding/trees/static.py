"""Draft trees as data: which ranks of which head become nodes.

A tree is its paths from the root, the current token: ``(0, 2)`` is what the second head ranks third after what the
first ranks first. The root itself is not listed, and every path's parent is.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.named_path import named_path
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Array, Float, Int

TreePath = tuple[int, ...]
Paths = tuple[TreePath, ...]

MAX_NODES = 1024
# The name of the tree that comes with drafters.
OWN_TREE = "own"
# How many tokens of each depth are combined.
_PRODUCT = re.compile(r"[1-9]\d*(\.[1-9]\d*)*")
# How many nodes are drafted for each one that a bounded sum verifies: it chooses, by chances, among these.
_CHOICE = 1.25

# Divides heads' logits before chances are taken of them, as heads are surer than they are right. Simulated along 39
# plain float32 texts, the default model's greedy answers to Spec-Bench prompts that its heads had not learned from, 16
# nodes gave 1.86 tokens a step at 0.8, 1.91 at 1, 1.93 at 1.3, 1.91 at 1.6 and 1.89 at 2 (1.87 with the best tree of
# ranks), and 64 nodes 2.10, 2.15 and 2.13 at 1, 1.3 and 1.6 (2.11).
CAUTION = 1.3

# The sparse trees published with Medusa (Cai et al., 2401.10774), in the order of their nodes' gain; a digit a rank.
_PUBLISHED = {
    "mc_sim_7b_63": """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000
        011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070""",
    "vicuna_7b_stage2": """
        0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030 0001
        005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 70 14""",
    "vicuna_33b_stage1": """
        0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 60 020
        31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021""",
    "zephyr_stage2": """
        0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 004 0000
        50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23""",
}
PUBLISHED_TREES: Mapping[str, Paths] = MappingProxyType(
    {name: tuple(tuple(map(int, path)) for path in text.split()) for name, text in _PUBLISHED.items()}
)


class TreeLayout(NamedTuple):
    """A tree's nodes, the root first, then level by level: each one's parent, depth and rank among its siblings."""

    parents_M: np.ndarray
    depths_M: np.ndarray
    ranks_M: np.ndarray


def lay_out(paths: Paths) -> TreeLayout:
    """Number the nodes of a tree by depth and then by path."""
    ordered: list[TreePath] = [(), *sorted(paths, key=lambda path: (len(path), path))]
    index = {path: node for node, path in enumerate(ordered)}
    return TreeLayout(
        np.array([index[path[:-1]] for path in ordered], np.int32),
        np.array([len(path) for path in ordered], np.int32),
        np.array([path[-1] if path else 0 for path in ordered], np.int32),
    )


def fill_tree(
    layout: TreeLayout,
    roots_B: Int[Array, " B"],
    log_p_BJR: Float[Array, "B J R"],
    tokens_BJR: Int[Array, "B J R"],
) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Return the tokens of a tree's nodes, and the log-probability of the path to each.

    ``tokens_BJR`` are those that are likeliest at each depth, the first the likeliest, whatever stands above them.
    """
    nodes = slice(1, None)
    depths, ranks = layout.depths_M[nodes] - 1, layout.ranks_M[nodes]
    steps_BM = jnp.pad(log_p_BJR[:, depths, ranks], ((0, 0), (1, 0)))
    scores_BM = steps_BM
    for _ in range(int(layout.depths_M.max()) - 1):
        scores_BM = steps_BM + scores_BM[:, layout.parents_M]
    return jnp.concatenate([roots_B[:, None], tokens_BJR[:, depths, ranks]], axis=1), scores_BM


def all_valid(layout: TreeLayout, tokens_BM: Int[Array, "B M"]) -> DraftTree:
    """Return the tree of this layout whose nodes are all drafts."""
    all_BM = jnp.ones(tokens_BM.shape, bool)
    return DraftTree(tokens_BM, jnp.broadcast_to(jnp.asarray(layout.parents_M), tokens_BM.shape), all_BM, all_BM)


def read_tree(name: str) -> Paths:
    """Return the tree that a user names.

    That is a published one, a product of as many tokens of each depth as ``4.2.1`` says, ``chain:K``, or a JSON file
    with a list of paths.
    """
    if name in PUBLISHED_TREES:
        return PUBLISHED_TREES[name]
    if is_product(name):
        return _read_product(name)
    kind, colon, depth = name.partition(":")
    if kind == "chain" and colon:
        if not depth.isdecimal() or not 1 <= int(depth) <= 64:
            raise InvalidOption(f"tree {name!r}: a chain has 1 to 64 nodes, as in chain:4")
        return tuple((0,) * length for length in range(1, int(depth) + 1))
    path = named_path(name)
    if not path.is_file():
        if name == OWN_TREE:
            raise InvalidOption(f"tree {name!r} comes with heads, which this strategy has none of: name another one")
        known = ", ".join((OWN_TREE, *PUBLISHED_TREES, "chain:K"))
        raise InvalidOption(f"tree {name!r} is none of {known}, a product such as 4.2.1 or a JSON file of paths")
    try:
        listed = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidOption(f"tree {name}: no JSON list of paths ({error})") from None
    return check_tree(listed, name)


def is_product(name: str) -> bool:
    """Tell whether a tree is named by how many tokens of each depth it combines: it lists its nodes by depth."""
    return _PRODUCT.fullmatch(name) is not None


def _read_product(name: str) -> Paths:
    widths = [int(width) for width in name.split(".")]
    level, nodes = 1, 1
    for width in widths:
        level *= width
        nodes += level
    if nodes > MAX_NODES:
        raise InvalidOption(f"tree {name}: has {nodes} nodes, more than {MAX_NODES}: combine fewer tokens")
    return tuple(
        path for depth in range(1, len(widths) + 1) for path in product(*(range(width) for width in widths[:depth]))
    )


def paths_for(paths: Paths, nodes: int | None, is_summed: bool) -> Paths:
    """Return the paths to draft for a pass over at most ``nodes``, the root included; all where it is None.

    They are listed as they gain; those above the ones that stay do too. A sum of drafters has a choice of some more.
    """
    if nodes is None:
        return paths
    count = math.ceil((nodes - 1) * _CHOICE) if is_summed else nodes - 1
    kept = {path[:depth] for path in paths[:count] for depth in range(1, len(path) + 1)}
    return tuple(path for path in paths if path in kept)


def check_tree(listed: Any, name: str) -> Paths:
    """Return a list of paths as a tree; raises InvalidOption for one that is malformed or has a node without parent."""
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not 1 <= len(listed) < MAX_NODES:
        raise InvalidOption(f"tree {name}: needs a list of 1 to {MAX_NODES - 1} paths, such as [[0], [1], [0, 0]]")
    paths: list[TreePath] = []
    for path in listed:
        is_path = isinstance(path, Sequence) and not isinstance(path, str) and len(path) > 0
        if not is_path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise InvalidOption(f"tree {name}: {path!r:.60} is not a path of ranks of 0 or more, such as [0, 2]")
        paths.append(tuple(path))
    known = {(), *paths}
    if len(known) <= len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InvalidOption(f"tree {name}: path {list(twice)} is listed twice")
    for path in paths:
        if path[:-1] not in known:
            raise InvalidOption(f"tree {name}: path {list(path)} has no parent: list {list(path[:-1])} too")
    return tuple(paths)


def tree_depth(paths: Paths) -> int:
    """Return the depth of the deepest node."""
    return max((len(path) for path in paths), default=0)


def expected_tokens(paths: Iterable[TreePath], accuracies: Sequence[Sequence[float]]) -> float:
    """Return the tokens that a step gives on average; see `build_tree` for ``accuracies``."""
    return 1.0 + sum(float(np.prod([accuracies[at][rank] for at, rank in enumerate(path)])) for path in paths)


def build_tree(accuracies: Sequence[Sequence[float]], cost_of_nodes: Mapping[int, float]) -> Paths:
    """Return the tree that gives the most tokens a second.

    ``accuracies[k][r]`` is how often the token that head k ranks r-th is the right one; heads are taken as independent
    of each other, so that a node is right as often as the product along its path. ``cost_of_nodes`` are the seconds of
    a step of M nodes, the root included, by M (see `jaxinfer.decoding.tuning.tree_cost`); between them the cost is
    taken as linear. The best tree of each size is grown greedily, as nodes are never likelier than their parents.
    """
    if not accuracies or not all(len(ranks) and all(0 <= a <= 1 for a in ranks) for ranks in accuracies):
        raise InvalidOption("a tree is built from one list of accuracies from 0 to 1 for each head")
    if not cost_of_nodes or min(cost_of_nodes) < 1 or min(cost_of_nodes.values()) <= 0:
        raise InvalidOption("a tree is built from positive seconds for each of some numbers of nodes from 1 on")
    sizes = sorted(cost_of_nodes)
    seconds = [cost_of_nodes[size] for size in sizes]
    frontier: list[tuple[float, TreePath]] = []
    grown: list[TreePath] = []
    best, tokens, parent, likelihood = (), 1.0, (), 1.0
    rate = 1.0 / float(np.interp(1, sizes, seconds))
    while len(grown) + 1 < sizes[-1]:
        if len(parent) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(parent)]):
                heappush(frontier, (-likelihood * accuracy, (*parent, rank)))
        if not frontier or frontier[0][0] == 0:
            break
        negative, parent = heappop(frontier)
        likelihood = -negative
        grown.append(parent)
        tokens += likelihood
        new_rate = tokens / float(np.interp(len(grown) + 1, sizes, seconds))
        if new_rate > rate:
            best, rate = tuple(grown), new_rate
    return best
