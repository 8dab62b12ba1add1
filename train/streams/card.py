"""The card of trained streams: what they are, their training and their quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from train.heads.card import describe_accuracies, describe_recipe
from train.loop.fit import FitResult


def describe_streams(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    expected: Mapping[int, float],
    num_params: int,
) -> str:
    """Return a card in Markdown; ``expected`` maps the tree's number of nodes to tokens per step."""
    changed = (
        "it was trained together with the streams, and is another model than what it was trained from."
        if facts["joint"]
        else "it was frozen. The streams change no token of what the base writes."
    )
    return "\n".join(
        [
            f"# {facts['streams']} speculative streams for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; {changed}",
            "",
            "    jaxinfer generate --strategy streams:heads=FOLDER ...",
            "",
            f"{num_params:,} parameters, through the last {facts['layers']} layers. Trained for {result.best_step} "
            f"steps on {facts['num_tokens']:,} tokens of answers in {', '.join(facts['data'])}, "
            f"{facts['positions']} of each row a step; of {result.steps} steps run, those were the best on the "
            "held-out texts.",
            "",
            *describe_accuracies("stream", accuracies, expected),
            "",
            *describe_recipe(facts),
            "",
        ]
    )
