"""The card that trained heads come with: what they are, of what, and how good."""

from collections.abc import Mapping, Sequence
from typing import Any

from train.fit import FitResult


def describe_heads(
    model: str,
    facts: Mapping[str, Any],
    result: FitResult,
    accuracies: Sequence[Sequence[float]],
    expected: Mapping[int, float],
    num_tokens: int,
) -> str:
    """Return a card in Markdown; ``expected`` are tokens a step by the nodes of the tree."""
    kind = "Hydra heads, conditioned on the tokens drafted before" if facts["conditioned"] else "Medusa heads"
    rows = [
        f"| {head + 1} | " + " | ".join(f"{100 * sum(ranks[:count]):.1f}%" for count in (1, 2, 5, 10)) + " |"
        for head, ranks in enumerate(accuracies)
    ]
    return "\n".join(
        [
            f"# {facts['num_heads']} {kind} for {model}",
            "",
            f"Base: {model}, fingerprint `{facts['base']}`; it was frozen. The heads draft for these weights,",
            "and change no token of what the base writes.",
            "",
            "    jaxinfer generate --strategy medusa:heads=FOLDER ...",
            "",
            f"Trained for {result.best_step} steps on {num_tokens:,} tokens of {', '.join(facts['data'])}; of "
            f"{result.steps} steps run, those were the best on the held-out texts.",
            "",
            "## Held-out figures",
            "",
            "How often the right token is among a head's best 1, 2, 5 and 10, given that those before it are right:",
            "",
            "| head | top 1 | top 2 | top 5 | top 10 |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Tokens a step that follow from them, by the nodes of the best tree, the root included: "
            + ", ".join(f"{nodes}: {tokens:.2f}" for nodes, tokens in expected.items())
            + ". `tree.json` is the tree of 16.",
            "",
            "## Recipe",
            "",
            *(f"* {name}: {value}" for name, value in sorted(facts.items()) if value is not None),
            "",
        ]
    )
