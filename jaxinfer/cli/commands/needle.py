"""``jaxinfer bench needle``: facts found in long texts, by cache and by the tokens that a query reads."""

import argparse
import dataclasses
import json
from pathlib import Path

from jaxinfer.bench.needle.haystack import MOST_OTHERS
from jaxinfer.cli.arguments import add_model_arguments, whole_number, whole_numbers
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.errors import InvalidOption

# The tokens of a text without its plain sentences: names, their secrets and a question.
_LEAST = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench needle``."""
    for name, least, default, text in (
        ("--lengths", _LEAST, "1024", "tokens of a text"),
        ("--budgets", 32, "64,128,256", "tokens that a query reads, multiples of 32"),
    ):
        parser.add_argument(
            name, metavar="N", type=whole_numbers(least), default=default, help=f"{text} (default: %(default)s)"
        )
    for name, default, text in (
        ("--depths", 5, "places of a fact, from the beginning of a text to its end"),
        ("--texts", 4, "texts for each place"),
    ):
        parser.add_argument(
            name, metavar="N", type=whole_number(1), default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--others",
        metavar="N",
        type=whole_number(0),
        default=7,
        help="facts in a text that nothing asks for (default: %(default)s)",
    )
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw a chart to a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    if wrong := [budget for budget in options.budgets if budget % 32]:
        raise InvalidOption(f"--budgets: {wrong[0]} is not a multiple of 32")
    if max(options.budgets) >= min(options.lengths):
        raise InvalidOption(
            f"--budgets: {max(options.budgets)} is no less than a text of {min(options.lengths)} tokens"
        )
    if options.cache != "dense":
        raise InvalidOption(f"--cache {options.cache}: bench needle compares caches; leave it out")
    if options.others > MOST_OTHERS:
        raise InvalidOption(f"--others: a text has at most {MOST_OTHERS} facts that nothing asks for")
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.needle.chart import draw_needles
    from jaxinfer.bench.needle.measure import check_needles, measure_needles, num_runs
    from jaxinfer.bench.needle.table import needle_lines
    from jaxinfer.cli.loading import load_model
    from jaxinfer.model_loading import DEFAULT_MODEL

    if options.chart is not None:
        check_chart(options.chart)
    model = load_model(options)
    check_needles(model, options.lengths, options.budgets)
    depths = [(place + 0.5) / options.depths for place in range(options.depths)]
    name = DEFAULT_MODEL if options.model is None else Path(options.model).name
    with count_progress("needle", num_runs(options.lengths, options.budgets)) as advance:
        asked = options.lengths, options.budgets, depths, options.texts
        report = measure_needles(name, model, *asked, advance, options.others)
    print(json.dumps(dataclasses.asdict(report)) if options.json else "\n".join(needle_lines(report)))
    if options.chart is not None:
        draw_needles(report, options.chart)
    return 0
