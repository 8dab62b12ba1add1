"""Writes trained heads as decoding loads them: their weights, the trees that suit them, their card."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.medusa_heads import TREE, write_heads
from jaxinfer.decoding.draft_trees import expected_tokens
from jaxinfer.language_model import LanguageModel
from jaxinfer.notation import Params
from train.arguments import identity
from train.fit import FitResult
from train.head_card import describe_heads
from train.head_evaluation import best_tree
from train.head_shapes import HeadShape

HEADS = "heads"
_TREE_SIZES = (8, 16, 32, 64)


def export_heads(
    options: argparse.Namespace,
    lm: LanguageModel,
    base: str,
    shape: HeadShape,
    heads: Params,
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    num_tokens: int,
    model: str = "",
    facts: Mapping[str, Any] = {},
) -> None:
    """Write ``OUT/heads``, for the weights of fingerprint ``base``; what stood there before is replaced whole.

    ``model`` names what they draft for where that is not ``--model``; ``facts`` are further figures for the card.
    """
    ranks = [list(one) for one in accuracies]
    trees = {nodes: best_tree(ranks, nodes) for nodes in _TREE_SIZES}
    expected = {nodes: expected_tokens(tree, ranks) for nodes, tree in trees.items()}
    dtype = lm.backend.param_dtype if np.dtype(lm.backend.param_dtype).itemsize == 2 else "bfloat16"
    stored = jax.tree.map(lambda leaf: leaf.astype(dtype), heads)
    if shape.draft_ids is not None:
        stored = {**stored, "ids": jnp.asarray(shape.draft_ids, jnp.int32)}
    told = {**identity(options), **dataclasses.asdict(shape), "draft_ids": None, "base": base, **facts}
    card = describe_heads(model or options.model, told, result, ranks, expected, num_tokens)
    beside = {f"tree_{nodes}.json": json.dumps(tree) + "\n" for nodes, tree in trees.items()}
    beside |= {TREE: json.dumps(trees[16]) + "\n", "accuracies.json": json.dumps(ranks) + "\n", "README.md": card}
    folder = options.out / HEADS
    write_heads(
        folder,
        stored,
        lm.config.vocab_size,
        base=model or options.model,
        base_fingerprint=base,
        in_int8=options.int8,
        beside=beside,
        overwrite=True,
    )
    print(
        f"{folder}: {result.best_step} steps, {expected[16]:.2f} tokens a step expected of 16 nodes, "
        f"{expected[64]:.2f} of 64; draft with --strategy medusa:heads={folder}",
        file=sys.stderr,
    )
