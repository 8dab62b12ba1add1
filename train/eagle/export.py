"""Writes a trained EAGLE-3 drafter in the published layout, with draft trees and a card."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.checkpoint.drafters.eagle import write_eagle
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.drafters.eagle import EagleShape
from jaxinfer.notation import Params
from train.heads.card import describe_accuracies, describe_recipe
from train.heads.export import stored_dtype
from train.heads.trees import SIZES, tokens_a_step, trees_beside
from train.loop.fit import FitResult
from train.loop.step import cast_floats

DRAFTER = "drafter"


def export_eagle(
    options: argparse.Namespace,
    lm: LanguageModel,
    told: Mapping[str, Any],
    shape: EagleShape,
    drafter: Params,
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    num_tokens: int,
) -> None:
    """Write ``OUT/drafter``, for the run that ``told`` describes; an existing folder is replaced as a whole."""
    ranks = [list(one) for one in accuracies]
    expected = {nodes: tokens_a_step(ranks, nodes) for nodes in SIZES}
    rows = len(drafter["ids"]) if "ids" in drafter else lm.config.vocab_size
    card = describe(
        options.model,
        {
            **told,
            "share_lm_head": "output" not in drafter,
            "features": list(shape.layers),
            "draft_vocabulary": rows,
        },
        result,
        ranks,
        expected,
        num_tokens,
    )
    folder = options.out / DRAFTER
    write_eagle(
        folder,
        shape,
        cast_floats(drafter, stored_dtype(lm.backend)),
        lm.config.vocab_size,
        lm.config.num_layers,
        base=options.model,
        base_fingerprint=told["base"],
        beside={**trees_beside(ranks), "README.md": card},
        overwrite=True,
    )
    print(
        f"{folder}: {result.best_step} steps, {expected[16]:.2f} tokens a step expected of 16 nodes, "
        f"{expected[64]:.2f} of 64; draft with --strategy eagle:heads={folder}",
        file=sys.stderr,
    )


def describe(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    expected: Mapping[int, float],
    num_tokens: int,
) -> str:
    """Return the drafter's card in Markdown; ``expected`` maps the tree's number of nodes to tokens per step."""
    return "\n".join(
        [
            f"# An EAGLE-3 drafter for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; it was frozen. The drafter is for these weights,",
            f"and changes no token of what they write. It reads the hidden states before layers {facts['features']},",
            f"and drafts among {facts['draft_vocabulary']:,} tokens.",
            "",
            "    jaxinfer generate --strategy eagle:heads=FOLDER ...",
            "",
            f"Trained for {result.best_step} steps on {num_tokens:,} tokens of {', '.join(facts['data'])}; of "
            f"{result.steps} steps run, those were the best on the held-out texts.",
            *(
                []
                if facts["init"] is None
                else ["It went on from a drafter that had been trained before (`init` below)."]
            ),
            "",
            *describe_accuracies("depth", accuracies, expected),
            "",
            *describe_recipe(facts),
            "",
        ]
    )
