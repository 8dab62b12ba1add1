"""Writes trained heads in the form that decoding loads: weights, draft trees and card."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.drafters.heads import write_heads
from jaxinfer.language_model import LanguageModel
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from train.arguments import identity
from train.heads.card import describe_heads
from train.heads.shapes import HeadShape
from train.heads.trees import SIZES, tokens_a_step, trees_beside
from train.loop.fit import FitResult
from train.loop.step import cast_floats

HEADS = "heads"


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
    """Write ``OUT/heads`` for the weights with fingerprint ``base``; an existing folder is replaced as a whole.

    ``model`` names the model that they draft for, if it is not ``--model``; ``facts`` are further facts for the card.
    """
    ranks = [list(one) for one in accuracies]
    expected = {nodes: tokens_a_step(ranks, nodes) for nodes in SIZES}
    stored = cast_floats(heads, stored_dtype(lm.backend))
    if shape.draft_ids is not None:
        stored = {**stored, "ids": jnp.asarray(shape.draft_ids, jnp.int32)}
    told = {**identity(options), **dataclasses.asdict(shape), "draft_ids": None, "base": base, **facts}
    card = describe_heads(model or options.model, told, result, ranks, expected, num_tokens)
    beside = {**trees_beside(ranks), "README.md": card}
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


def stored_dtype(backend: Backend) -> str:
    """Return the dtype in which drafters are stored: 16 bits, the base's if it has them."""
    return backend.param_dtype if np.dtype(backend.param_dtype).itemsize == 2 else "bfloat16"
