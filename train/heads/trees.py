"""The best draft trees for given accuracies by depth and rank, and their expected tokens per step."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.drafters.shipped import TREE
from jaxinfer.decoding.trees.static import Paths, build_tree, expected_tokens

SIZES = (8, 16, 32, 64)
OWN_SIZE = 16


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Paths:
    """Return the tree of ``nodes`` nodes, root included, with the most expected tokens per step.

    ``accuracies[k][r]`` are as in `jaxinfer.decoding.tuning.head_accuracy.measure_accuracies`.
    """
    return build_tree([list(ranks) for ranks in accuracies], {1: 1.0, nodes: 1.0})


def tokens_a_step(accuracies: Sequence[Sequence[float]], nodes: int) -> float:
    """Return the expected tokens per step of the best tree of ``nodes`` nodes."""
    ranks = [list(one) for one in accuracies]
    return expected_tokens(best_tree(ranks, nodes), ranks)


def evaluation_figures(accuracies: Sequence[Sequence[float]], nodes: int) -> Mapping[str, Any]:
    """Return a run's record of an evaluation: score, tokens per step, and accuracy of each first guess."""
    top1 = [round(ranks[0], 4) for ranks in accuracies]
    return {"score": round(tokens_a_step(accuracies, nodes), 4), "top1": top1}


def trees_beside(accuracies: Sequence[Sequence[float]]) -> dict[str, str]:
    """Return the files beside drafters: trees of several sizes, one of them the default, and the accuracies."""
    trees = {nodes: json.dumps(best_tree(accuracies, nodes)) + "\n" for nodes in SIZES}
    ranks = json.dumps([list(one) for one in accuracies]) + "\n"
    return {f"tree_{nodes}.json": text for nodes, text in trees.items()} | {
        TREE: trees[OWN_SIZE],
        "accuracies.json": ranks,
    }
