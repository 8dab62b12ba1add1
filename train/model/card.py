"""The card of a trained model: what it is, its training and its quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from train.loop.fit import FitResult


def describe_model(
    title: str,
    about: Sequence[str],
    use: str,
    figures: Sequence[str],
    facts: Mapping[str, Any],
    result: FitResult,
    num_tokens: int,
) -> str:
    """Return a card in Markdown; ``facts`` are the run's options and everything else that it depends on."""
    return "\n".join(
        [
            f"# {title}",
            "",
            *about,
            "",
            f"    {use}",
            "",
            f"Trained for {result.best_step} steps with seed {facts['seed']} on {num_tokens:,} tokens of "
            f"{', '.join(facts['data'])}; of {result.steps} steps run, those were the best on the held-out texts.",
            "",
            "## Held-out figures",
            "",
            *figures,
            "",
            "## Recipe",
            "",
            *(f"* {name}: {value}" for name, value in sorted(facts.items()) if value is not None),
            "",
        ]
    )
