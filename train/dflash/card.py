"""The card of a trained DFlash drafter: what it is, its training and its quality."""

from collections.abc import Mapping
from typing import Any

from train.dflash.evaluation import Agreement
from train.heads.card import describe_accuracies, describe_recipe
from train.loop.fit import FitResult


def describe_dflash(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    found: Agreement,
    expected: Mapping[int, float],
    num_params: int,
) -> str:
    """Return a card in Markdown; ``expected`` maps the tree's number of nodes to tokens per step."""
    return "\n".join(
        [
            f"# A DFlash drafter for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; it was frozen. The drafter changes no token of its texts.",
            "",
            "    jaxinfer generate --strategy dflash:heads=FOLDER ...",
            "",
            f"{num_params:,} parameters in {facts['layers']} layers, blocks of {facts['block_size']}. Trained for "
            f"{result.best_step} steps on {facts['num_tokens']:,} tokens of answers in {', '.join(facts['data'])}, "
            f"{facts['anchors']} blocks of each row a step; of {result.steps} steps run, those were the best on the "
            "held-out texts.",
            "",
            f"A block whose tokens are all drafted as a chain gives {found.tokens:.2f} tokens a step on these.",
            "",
            *describe_accuracies("place", found.accuracies, expected),
            "",
            *describe_recipe(facts),
            "",
        ]
    )
