"""``tree-size``: the speed-up of streams against k, the tokens that are taken of each stream, with and without pruning.

A tree of k tokens at each of three depths has 1 + k + k^2 + k^3 nodes, each with three streams beside it in the top
layers. With pruning, an early exit keeps only the best of them from there on. Tokens a step are measured; what a step
costs is measured on this device, and told by the compiler for a TPU.
"""

import argparse
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from train.command import number
from train.talks.setup import Measured, add_measuring_arguments, measure, stored

SUMMARY = "the speed-up of streams by k of the top-k tree, with and without pruning"
_DEPTH = 3
# What the models that `jaxinfer plan` knows by name are called elsewhere.
_PLANNED: Mapping[str, str] = MappingProxyType({"smollm2-135m-instruct": "smollm2-135m"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    add_measuring_arguments(parser)
    whole = number(int, 1)
    parser.add_argument("--k", metavar="K", type=whole, nargs="+", default=[1, 2, 3, 4], help="default: 1 2 3 4")
    parser.add_argument(
        "--keep", metavar="N", type=whole, default=8, help="drafts that pruning keeps (default: %(default)s)"
    )
    parser.add_argument("--depth", metavar="D", type=whole, default=_DEPTH, help="of the tree (default: %(default)s)")
    parser.add_argument("--streams", metavar="FOLDER", default="", help="the streams (default: those of the package)")
    parser.add_argument(
        "--topology",
        metavar="T",
        default="v5e:1x1",
        help="also tell what a step costs on this TPU; none: do not (default: %(default)s)",
    )


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all trees on all tasks, and return the table."""
    ks = sorted(set(options.k))
    specs = {(k, keep): _spec(options, k, keep) for k in ks for keep in _kept(options, k)}
    measured = measure(options, list(dict.fromkeys(specs.values())))
    costs = {} if options.topology == "none" else {of: _cost(options, *of) for of in specs}
    rows = []
    for (k, keep), spec in specs.items():
        gained, pace = _mean_of(measured, spec)
        cost = costs.get((k, keep))
        row = {"k": k, "keep": keep, "nodes": 1 + sum(k**depth for depth in range(1, options.depth + 1))}
        row |= {"tokens_per_step": pace, "speed_up": gained, "tpu_cost": cost}
        rows.append(row | {"tpu_speed_up": None if cost is None else pace / cost})
    told = {"model": options.model, "dtype": options.dtype, "topology": options.topology, "tasks": options.tasks}
    return {**told, "prompts": options.prompts, "max_new_tokens": options.max_new_tokens, "rows": rows}


def _kept(options: argparse.Namespace, k: int) -> list[int]:
    """Return how many drafts are kept: all, and fewer where there are more."""
    nodes = sum(k**depth for depth in range(1, options.depth + 1))
    return [0, options.keep] if nodes > options.keep else [0]


def _spec(options: argparse.Namespace, k: int, keep: int, *, is_planned: bool = False) -> str:
    folder = f",heads={options.streams}" if options.streams and not is_planned else ""
    kept = f",keep_nodes={keep}" if keep else ""
    return f"streams:tree={'.'.join([str(k)] * options.depth)}{folder}{kept}"


def _mean_of(measured: Measured, spec: str) -> tuple[float, float]:
    """Return the speed-up and the tokens a step of a strategy over all tasks' tokens."""
    tokens = steps = seconds = plain = 0.0
    for found in measured.tasks.values():
        own, baseline = found[spec], found["autoregressive"]
        tokens, steps = tokens + own.tokens, steps + own.steps
        seconds += own.tokens / (own.tokens_per_second or 1)
        plain += own.tokens / (baseline.tokens_per_second or 1)
    return (plain / seconds if seconds else 0.0), (tokens / steps if steps else 0.0)


def _cost(options: argparse.Namespace, k: int, keep: int) -> float:
    """Return what a step takes on a TPU over a plain step, by the compiler's program."""
    model = _PLANNED.get(options.model, options.model)
    words = ["--model", model, "--topology", options.topology, "--strategy", _spec(options, k, keep, is_planned=True)]
    path = stored(options, "plan", "jaxinfer", "plan", *words, "--json")
    return float(json.loads(path.read_bytes())["speculation"]["cost"])


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["k", "drafts kept", "nodes", "tokens a step", "speed-up", f"{table['topology']}: cost", "speed-up there"]]
    for one in table["rows"]:
        there = ["", ""] if one["tpu_cost"] is None else [f"{one['tpu_cost']:.2f}", f"{one['tpu_speed_up']:.2f}x"]
        kept = str(one["keep"] or "all")
        pace = f"{one['tokens_per_step']:.2f}"
        found.append([str(one["k"]), kept, str(one["nodes"]), pace, f"{one['speed_up']:.2f}x", *there])
    return found


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw the speed-up against k, here and on the TPU, and the tokens a step."""
    has_tpu = table["topology"] != "none"
    panels = [("speed_up", "measured here"), *([("tpu_speed_up", f"{table['topology']}, by the compiler")] * has_tpu)]
    for axes, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for keep in dict.fromkeys(one["keep"] for one in table["rows"]):
            own = [one for one in table["rows"] if one["keep"] == keep]
            label = f"the best {keep} drafts kept" if keep else "all drafts kept"
            axes.plot([one["k"] for one in own], [one[key] for one in own], marker="o", label=label)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(sorted({one["k"] for one in table["rows"]}))
        axes.set_xlabel("k, tokens of each stream")
        axes.set_ylabel("times plain decoding")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()
