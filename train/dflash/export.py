"""Writes a trained DFlash drafter in the published layout, with draft trees and a card."""

import argparse
import sys

import jax
import numpy as np

from jaxinfer.checkpoint.drafters.dflash import write_dflash
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.drafters.dflash import DFlashConfig
from train.arguments import identity
from train.dflash.card import describe_dflash
from train.dflash.evaluation import Agreement
from train.heads.export import stored_dtype
from train.heads.trees import SIZES, tokens_a_step, trees_beside
from train.loop.fit import FitResult
from train.loop.step import cast_floats

DRAFTER = "dflash"


def export_dflash(
    options: argparse.Namespace,
    lm: LanguageModel,
    dflash: DFlashConfig,
    result: FitResult,
    found: Agreement,
    num_tokens: int,
) -> None:
    """Write ``OUT/dflash`` with trees, accuracies and card; an existing folder is replaced as a whole."""
    model, base = options.model, lm.base_fingerprint
    expected = {nodes: tokens_a_step(found.accuracies, nodes) for nodes in SIZES}
    stored = jax.tree.map(np.asarray, cast_floats(result.params, stored_dtype(lm.backend)))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(stored))
    facts = {**identity(options), "base": base, "num_tokens": num_tokens}
    card = describe_dflash(model, facts, result, found, expected, num_params)
    beside = {**trees_beside(found.accuracies), "README.md": card}
    folder = options.out / DRAFTER
    write_dflash(folder, dflash, stored, lm.config, base=model, base_fingerprint=base, beside=beside, overwrite=True)
    print(
        f"{folder}: {result.best_step} steps, {num_params:,} parameters, {found.tokens:.2f} tokens a step expected of "
        f"whole blocks, {expected[16]:.2f} of a tree of 16 nodes; draft with --strategy dflash:heads={folder}",
        file=sys.stderr,
    )
