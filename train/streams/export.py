"""Writes trained streams in the form that decoding loads, and the model if it was trained with them."""

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.checkpoint.drafters.streams import write_streams
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.drafters.streams import StreamsConfig
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.models.folded import folded_adapters
from train.arguments import identity
from train.heads.export import stored_dtype
from train.heads.trees import SIZES, tokens_a_step, trees_beside
from train.loop.fit import FitResult
from train.loop.step import cast_floats
from train.model.lora import merge_lora
from train.streams.card import describe_streams

STREAMS, MODEL = "streams", "model"


def export_streams(
    options: argparse.Namespace,
    lm: LanguageModel,
    streams: StreamsConfig,
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    num_tokens: int,
    lora_scale: float,
) -> None:
    """Write ``OUT/streams`` with trees, accuracies and card, and a changed model to ``OUT/model``.

    Existing folders are replaced as a whole. ``num_tokens`` is the number of training tokens.
    """
    model, base = options.model, lm.base_fingerprint
    if "lora" in result.params:
        lm.params = merge_lora(lm.params, result.params["lora"], lora_scale)
        model, base = str(lm.save(options.out / MODEL, overwrite=True)), fingerprint(lm.params)
    ranks = [list(one) for one in accuracies]
    expected = {nodes: tokens_a_step(ranks, nodes) for nodes in SIZES}
    stored = jax.tree.map(np.asarray, cast_floats(result.params["streams"], stored_dtype(lm.backend)))
    if "blocks" in stored:
        # As they would be for the weights whose fingerprint they name.
        first = lm.config.num_layers - streams.num_layers
        stored = {**stored, "blocks": folded_adapters(stored["blocks"], lm.folded, first, power=-1)}
    num_params = sum(leaf.size for leaf in jax.tree.leaves(stored))
    facts = {**identity(options), "base": base, "num_tokens": num_tokens}
    card = describe_streams(model, facts, result, ranks, expected, num_params)
    beside = {**trees_beside(ranks), "README.md": card}
    folder = options.out / STREAMS
    write_streams(folder, streams, stored, lm.config, base=model, base_fingerprint=base, beside=beside, overwrite=True)
    print(
        f"{folder}: {result.best_step} steps, {num_params:,} parameters, {expected[16]:.2f} tokens a step expected "
        f"of 16 nodes, {expected[64]:.2f} of 64; draft with --strategy streams:heads={folder}",
        file=sys.stderr,
    )
