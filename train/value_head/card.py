"""The card of a value head: what it reads, its training and how well it tells answers apart."""

from collections.abc import Mapping
from typing import Any

from train.heads.card import describe_recipe
from train.loop.fit import FitResult
from train.value_head.loss import SHARES


def describe_value_head(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    figures: Mapping[str, Any],
    num_answers: int,
    scores: tuple[float, float],
) -> str:
    """Return a card in Markdown; ``figures`` are those of `ValueEvaluation`, ``scores`` their mean and spread."""
    rows = [
        f"| {100 * share:.0f}% | " + ("no pairs" if right is None else f"{100 * right:.1f}%") + " |"
        for share, right in zip(SHARES, figures["right_pairs"])
    ]
    return "\n".join(
        [
            f"# A value head for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; it was frozen. The head says at each token of an answer",
            "what the whole answer will be worth, and a tree search looks where that is most.",
            "",
            "    jaxinfer generate --strategy mcts:value=FOLDER ...",
            "",
            f"Trained for {result.best_step} steps on {num_answers:,} answers, whose scores are {scores[0]:.3f} in the",
            f"mean with a standard deviation of {scores[1]:.3f}; of {result.steps} steps run, those were the best on",
            "held-out prompts.",
            "",
            "## Held-out figures",
            "",
            f"Values explain {100 * figures['explained']:.1f}% of the variance of scores. Of two answers to one prompt "
            "with different scores, the better one has the higher value:",
            "",
            "| after so much of both | right |",
            "|---|---|",
            *rows,
            "",
            *describe_recipe(facts),
            "",
        ]
    )
