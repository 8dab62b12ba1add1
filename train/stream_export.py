"""Writes trained streams as decoding loads them, and the model where it was trained with them."""

import argparse
import json
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.checkpoint.stream_heads import TREE, write_streams
from jaxinfer.decoding.draft_trees import expected_tokens
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.models.stream_heads import StreamsConfig
from train.arguments import identity
from train.fit import FitResult
from train.head_evaluation import best_tree
from train.lora import merge_lora
from train.stream_card import describe_streams

STREAMS, MODEL = "streams", "model"
_TREE_SIZES = (8, 16, 32, 64)


def export_streams(
    options: argparse.Namespace,
    lm: LanguageModel,
    streams: StreamsConfig,
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    num_tokens: int,
    lora_scale: float,
) -> None:
    """Write ``OUT/streams`` with its trees, accuracies and card, and a changed model to ``OUT/model``.

    What stood there before is replaced whole. ``num_tokens`` are those that were learned from.
    """
    model = options.model
    if "lora" in result.params:
        lm.params = merge_lora(lm.params, result.params["lora"], lora_scale)
        model = str(lm.save(options.out / MODEL, overwrite=True))
    base, ranks = fingerprint(lm.params), [list(one) for one in accuracies]
    trees = {nodes: best_tree(ranks, nodes) for nodes in _TREE_SIZES}
    expected = {nodes: expected_tokens(tree, ranks) for nodes, tree in trees.items()}
    dtype = lm.backend.param_dtype if np.dtype(lm.backend.param_dtype).itemsize == 2 else "bfloat16"
    stored = jax.tree.map(lambda leaf: np.asarray(leaf.astype(dtype)), result.params["streams"])
    num_params = sum(leaf.size for leaf in jax.tree.leaves(stored))
    facts = {**identity(options), "base": base, "num_tokens": num_tokens}
    card = describe_streams(model, facts, result, ranks, expected, num_params)
    beside = {f"tree_{nodes}.json": json.dumps(tree) + "\n" for nodes, tree in trees.items()}
    beside |= {TREE: json.dumps(trees[16]) + "\n", "accuracies.json": json.dumps(ranks) + "\n", "README.md": card}
    folder = options.out / STREAMS
    write_streams(folder, streams, stored, lm.config, base=model, base_fingerprint=base, beside=beside, overwrite=True)
    print(
        f"{folder}: {result.best_step} steps, {num_params:,} parameters, {expected[16]:.2f} tokens a step expected "
        f"of 16 nodes, {expected[64]:.2f} of 64; draft with --strategy streams:heads={folder}",
        file=sys.stderr,
    )
