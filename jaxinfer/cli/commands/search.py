"""``jaxinfer bench search``: right answers by compute, of tree search, the best of n samples and plain decoding."""

import argparse
import dataclasses
import json
from pathlib import Path

from jaxinfer.cli.arguments import add_model_arguments, positive_number, whole_number, whole_numbers
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.errors import InvalidOption

_TASKS = ("sql", "letter", "numbers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench search``."""
    parser.add_argument(
        "--tasks", metavar="A,B", default="sql,letter", help=f"of {', '.join(_TASKS)} (default: %(default)s)"
    )
    parser.add_argument(
        "--texts",
        metavar="N",
        type=whole_numbers(4),
        default="4,16,64",
        help="budgets: texts a problem, multiples of 4 (default: %(default)s)",
    )
    parser.add_argument(
        "--actions", metavar="N", type=whole_number(1), default=8, help="tokens tried at a node (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=positive_number,
        default=0.7,
        help="of samples; searches draw nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--value",
        metavar="FOLDER",
        help="a value head: compare choices by it, by the checker and by likelihood (default: by the checker alone)",
    )
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw a chart to a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    names = options.tasks.split(",")
    if unknown := [name for name in names if name not in _TASKS]:
        raise InvalidOption(f"--tasks: unknown task {unknown[0]!r}; the tasks are {', '.join(_TASKS)}")
    if wrong := [count for count in options.texts if count % 4]:
        raise InvalidOption(
            f"--texts: {wrong[0]} is not a multiple of 4, so that it does not share out over 4 searches"
        )
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.search.chart import draw_search
    from jaxinfer.bench.search.measure import measure_search, num_runs
    from jaxinfer.bench.search.table import search_lines
    from jaxinfer.bench.search.tasks import TASKS
    from jaxinfer.checkpoint.value_head import read_value_head
    from jaxinfer.cli.loading import load_model
    from jaxinfer.model_loading import DEFAULT_MODEL

    if options.chart is not None:
        check_chart(options.chart)
    model = load_model(options)
    if options.value is not None:
        read_value_head(Path(options.value), model.config, lambda: model.base_fingerprint)
    tasks = [TASKS[name]() for name in names]
    name = DEFAULT_MODEL if options.model is None else Path(options.model).name
    with count_progress("search", num_runs(tasks, options.texts, options.value)) as advance:
        report = measure_search(
            name,
            model,
            tasks,
            options.texts,
            temperature=options.temperature,
            actions=options.actions,
            advance=advance,
            value=options.value,
        )
    print(json.dumps(dataclasses.asdict(report)) if options.json else "\n".join(search_lines(report)))
    if options.chart is not None:
        draw_search(report, options.chart)
    return 0
