"""The card of trained heads: what they are, their training and their quality; and parts for other cards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from train.loop.fit import FitResult


def describe_heads(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    expected: Mapping[int, float],
    num_tokens: int,
) -> str:
    """Return a card in Markdown; ``expected`` maps the tree's number of nodes to tokens per step."""
    kind = "Hydra heads, conditioned on the tokens drafted before" if facts["conditioned"] else "Medusa heads"
    changed = f"it was trained with the heads, from {facts['trained_from']}" if facts.get("joint") else "it was frozen"
    return "\n".join(
        [
            f"# {facts['num_heads']} {kind} for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; {changed}. The heads draft for these weights,",
            "and change no token of what they write.",
            "",
            "    jaxinfer generate --strategy medusa:heads=FOLDER ...",
            "",
            f"Trained for {result.best_step} steps on {num_tokens:,} tokens of {', '.join(facts['data'])}; of "
            f"{result.steps} steps run, those were the best on the held-out texts.",
            "",
            *describe_accuracies("head", accuracies, expected),
            "",
            *describe_recipe(facts),
            "",
        ]
    )


def describe_accuracies(
    what: str, accuracies: Sequence[Sequence[float]], expected: Mapping[int, float]
) -> Iterable[str]:
    """Return lines on how often each drafter (``what``) is right, and the resulting tokens per step."""
    rows = [
        f"| {number} | " + " | ".join(f"{100 * sum(ranks[:count]):.1f}%" for count in (1, 2, 5, 10)) + " |"
        for number, ranks in enumerate(accuracies, 1)
    ]
    return [
        "## Held-out figures",
        "",
        f"How often the right token is among a {what}'s best 1, 2, 5 and 10, given that those before it are right:",
        "",
        f"| {what} | top 1 | top 2 | top 5 | top 10 |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Tokens a step that follow from them, by the nodes of the best tree, the root included: "
        + ", ".join(f"{nodes}: {tokens:.2f}" for nodes, tokens in expected.items())
        + ". `tree.json` is the tree of 16.",
    ]


def describe_recipe(facts: Mapping[str, Any]) -> Iterable[str]:
    """Return lines on the options and facts of a training run."""
    told = (f"* {name}: {value}" for name, value in sorted(facts.items()) if value is not None)
    return ["## Recipe", "", *told]
