"""``jaxinfer bench sparsity``: zeros by layer, weights that are not read, speed by batch and by tree."""

import argparse
import dataclasses
import json
from pathlib import Path

from jaxinfer.cli.arguments import add_model_arguments, whole_number, whole_numbers
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.cli.prompts import read_text
from jaxinfer.errors import InvalidOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench sparsity``."""
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="text whose activations are looked at")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=whole_number(2),
        default=128,
        help="look at its first N tokens (default: %(default)s)",
    )
    for name, default, text in (
        ("--batch", "1,2,4", "sequences of a step of one token each"),
        ("--nodes", "4,8,16", "nodes of a step of one sequence"),
    ):
        parser.add_argument(
            name, metavar="N", type=whole_numbers(1), default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--repeats", metavar="N", type=whole_number(1), default=3, help="runs, of which the best counts (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    text = read_text("--text", options.text)
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.sparsity.measure import least_tokens, measure_sparsity
    from jaxinfer.bench.sparsity.table import sparsity_lines
    from jaxinfer.cli.loading import load_model
    from jaxinfer.model_loading import DEFAULT_MODEL

    if options.sparsity is None:
        raise InvalidOption("bench sparsity: give --sparsity exact, threshold:T or topk:K")
    model = load_model(options)
    steps = dict.fromkeys([*((batch, 1) for batch in options.batch), *((1, nodes) for nodes in options.nodes)])
    tokens = model.tokenizer.encode(text)[: min(options.tokens, model.max_len)]
    least = max(least_tokens(nodes) for _, nodes in steps)
    if len(tokens) < least:
        raise InvalidOption(f"{options.text}: these steps need {least} tokens, but there are {len(tokens)}")
    with count_progress("sparsity", len(steps)) as advance:
        name = DEFAULT_MODEL if options.model is None else options.model
        report = measure_sparsity(name, model, tokens, list(steps), options.repeats, advance)
    print(json.dumps(dataclasses.asdict(report)) if options.json else "\n".join(sparsity_lines(report)))
    return 0
