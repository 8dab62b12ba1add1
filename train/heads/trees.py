"""The draft trees that follow from how often each of what drafts is right, by rank and depth, and what they promise."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.drafters.shipped import TREE
from jaxinfer.decoding.trees.static import Paths, build_tree, expected_tokens

SIZES = (8, 16, 32, 64)
OWN_SIZE = 16


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the tree of ``nodes``, the root included, that gives the most tokens a step.

    ``accuracies[k][r]`` are as `jaxinfer.decoding.tuning.head_accuracy.measure_accuracies` gives them.
    """
    return build_tree([list(ranks) for ranks in accuracies], {1: 1.0, nodes: 1.0})


def tokens_a_step(accuracies: Sequence[Sequence[float]], nodes: int) -> float:
    """Return what the best tree of ``nodes`` is expected to give."""
    ranks = [list(one) for one in accuracies]
    return expected_tokens(best_tree(ranks, nodes), ranks)


def evaluation_figures(accuracies: Sequence[Sequence[float]], nodes: int) -> Mapping[str, Any]:
    """Return what a run records of an evaluation: its score, tokens a step, and how often the first guess is right."""
    top1 = [round(ranks[0], 4) for ranks in accuracies]
    return {"score": round(tokens_a_step(accuracies, nodes), 4), "top1": top1}


def trees_beside(accuracies: Sequence[Sequence[float]]) -> dict[str, str]:
    """Return the files that drafters come with: trees of several sizes, one of them their own, and the accuracies."""
    trees = {nodes: json.dumps(best_tree(accuracies, nodes)) + "\n" for nodes in SIZES}
    ranks = json.dumps([list(one) for one in accuracies]) + "\n"
    return {f"tree_{nodes}.json": text for nodes, text in trees.items()} | {
        TREE: trees[OWN_SIZE],
        "accuracies.json": ranks,
    }
