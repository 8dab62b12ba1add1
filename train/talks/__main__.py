"""``python -m train.talks NAME``: tables and figures of talks on fast inference, made again at this scale.

Each writes ``OUT/NAME.json`` and a chart, ``OUT/NAME.svg``, and prints its rows. What is measured and trained stays in
the folder ``--work``, so the same command goes on after an interrupt.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from jaxinfer.bench.chart_file import check_chart, save_chart
from jaxinfer.bench.columns import align
from train.command import run_command
from train.talks import bits, break_even, distil, static_continuous, streams, tree_size, two_models

TABLES: Mapping[str, ModuleType] = MappingProxyType(
    {
        "streams": streams,
        "two-models": two_models,
        "break-even": break_even,
        "tree-size": tree_size,
        "static-continuous": static_continuous,
        "bits": bits,
        "distil": distil,
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command for each table."""
    commands = parser.add_subparsers(metavar="NAME", required=True, dest="name")
    for name, module in TABLES.items():
        command = commands.add_parser(name, help=module.SUMMARY, description=f"{module.SUMMARY.capitalize()}.")
        command.add_argument(
            "--work",
            metavar="FOLDER",
            type=Path,
            default=Path("talks"),
            help="folder for what is made on the way (default: %(default)s)",
        )
        command.add_argument(
            "--out", metavar="FOLDER", type=Path, help="folder of the table and its chart (default: --work)"
        )
        module.add_arguments(command)


def run(options: argparse.Namespace) -> int:
    """Make one table: write its JSON and its chart, and print its rows."""
    module = TABLES[options.name]
    options.out = options.work if options.out is None else options.out
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    place, chart = options.out / f"{options.name}.json", options.out / f"{options.name}.svg"
    check_chart(chart, "train.talks")
    table = module.build(options)
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    partial.rename(place)
    draw(module, table, chart)
    titles, *rows = module.rows(table)
    print(*align(titles, rows, num_left=2), sep="\n")
    print(f"{place}, {chart}", file=sys.stderr)
    return 0


def draw(module: ModuleType, table: Mapping[str, object], chart: Path) -> None:
    """Draw a table's chart."""
    # Imported here: it is optional. No pyplot, which would keep state and look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    module.draw(figure, table)
    save_chart(figure, chart)


if __name__ == "__main__":
    sys.exit(run_command("talks", "Make tables and figures of talks on fast inference again.", add_arguments, run))
