"""``static-continuous``: continuous against static batching, by the spread of the texts' lengths and the batch."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.command import number
from train.talks.setup import add_data_argument, add_model_arguments, data_folder, model_words, stored

SUMMARY = "continuous against static batching by the spread of lengths and the batch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    whole = number(int, 1)
    add_data_argument(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="JSONL file (default: DATA/prompts/spec_bench.jsonl)"
    )
    parser.add_argument("--requests", metavar="N", type=whole, default=24, help="prompts (default: %(default)s)")
    parser.add_argument("--at-once", metavar="N", type=whole, nargs="+", default=[4, 8], help="default: 4 8")
    parser.add_argument(
        "--spread",
        metavar="S",
        type=number(float, 0),
        nargs="+",
        default=[0.0, 0.5, 1.0, 1.5],
        help="standard deviations of lengths as parts of their mean (default: 0 0.5 1 1.5)",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=number(int, 2), default=48, help="mean length (default: %(default)s)"
    )
    parser.add_argument("--max-len", metavar="N", type=number(int, 2), default=1024, help="default: %(default)s")
    parser.add_argument("--repeats", metavar="N", type=whole, default=1, help="medians of (default: %(default)s)")


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways, by ``jaxinfer bench throughput``, and return the table."""
    prompts = options.prompts or data_folder(options) / "prompts" / "spec_bench.jsonl"
    words = [*model_words(options), "--prompts", prompts, "--chat", "--requests", options.requests]
    words += ["--max-new-tokens", options.max_new_tokens, "--max-len", options.max_len, "--repeats", options.repeats]
    words += ["--at-once", ",".join(map(str, dict.fromkeys(options.at_once)))]
    words += ["--spread", ",".join(f"{one:g}" for one in dict.fromkeys(options.spread)), "--json"]
    report = json.loads(stored(options, "throughput", "jaxinfer", "bench", "throughput", *words).read_bytes())
    speeds = {(load["kind"], load["size"], load["spread"]): load["tokens_per_second"] for load in report["loads"]}
    rows = [
        {
            "at_once": int(size),
            "spread": spread,
            "static": speeds["static", size, spread],
            "continuous": speed,
            "ratio": speed / speeds["static", size, spread],
        }
        for (kind, size, spread), speed in speeds.items()
        if kind == "clients"
    ]
    told = {name: report[name] for name in ("model", "dtype", "max_new_tokens", "repeats")}
    return {**told, "requests": options.requests, "rows": rows}


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["at once", "spread", "static, tokens/s", "continuous, tokens/s", "ratio"]]
    for one in table["rows"]:
        speeds = [f"{one['static']:.1f}", f"{one['continuous']:.1f}", f"{one['ratio']:.2f}x"]
        found.append([str(one["at_once"]), f"{one['spread']:g}", *speeds])
    return found


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw the ratio by spread, a line for each batch."""
    axes = figure.subplots()
    for size in dict.fromkeys(one["at_once"] for one in table["rows"]):
        own = [one for one in table["rows"] if one["at_once"] == size]
        axes.plot([one["spread"] for one in own], [one["ratio"] for one in own], "o-", label=f"{size} at once")
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xlabel("standard deviation / mean of lengths")
    axes.set_ylabel("continuous over static, tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend()
