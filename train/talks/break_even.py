"""``break-even``: streams against a draft model, over the ratio of their acceptances and of the models' latencies.

A draft model takes ``gamma`` passes of its own and one of the target for ``zeta`` tokens; streams take one pass of the
target with streams for ``beta``. The two are as fast where (gamma C_draft + C_target) / zeta = C_ss / beta. Nothing is
measured: points are those that ``two-models`` has measured before.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidOption
from train.command import number

SUMMARY = "where streams and a draft model are as fast, by the equation"
# Where the measured points are, beside this table's own file.
MEASURED = "two-models.json"
# The latencies, C_draft / C_target, that the lines are drawn over.
_LATENCIES = tuple(float(one) for one in np.round(np.geomspace(0.01, 1, 41), 5))


@dataclass(frozen=True)
class Point:
    """One measured pair; costs are seconds of a pass, ``zeta`` and ``beta`` tokens a verification."""

    task: str
    drafter: str
    gamma: int
    draft_cost: float
    target_cost: float
    stream_cost: float
    zeta: float
    beta: float

    @property
    def latency_ratio(self) -> float:
        """C_draft / C_target."""
        return self.draft_cost / self.target_cost

    @property
    def acceptance_ratio(self) -> float:
        """Return zeta / beta."""
        return self.zeta / self.beta

    @property
    def advantage(self) -> float:
        """How many times as fast as the draft model streams are: over 1, they win."""
        return (self.gamma * self.draft_cost + self.target_cost) / self.zeta / (self.stream_cost / self.beta)


def break_even(gamma: int, latency: float, stream_cost: float) -> float:
    """Return zeta / beta from which on a draft model is faster than streams.

    ``latency`` is C_draft / C_target and ``stream_cost`` is C_ss / C_target.
    """
    return (gamma * latency + 1) / stream_cost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    parser.add_argument(
        "--drafts", metavar="G", type=number(int, 1), nargs="+", default=[2, 4, 8], help="gamma (default: 2 4 8)"
    )
    parser.add_argument(
        "--stream-cost",
        metavar="C",
        type=number(float, 1e-6),
        help="C_ss / C_target of the lines (default: the points' median, or 1.1 where there are none)",
    )


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Return the lines and the points."""
    points = read_points(options.out / MEASURED)
    costs = [point.stream_cost / point.target_cost for point in points]
    cost = options.stream_cost or (float(np.median(costs)) if costs else 1.1)
    lines = [
        {"gamma": gamma, "zeta_over_beta": [break_even(gamma, latency, cost) for latency in _LATENCIES]}
        for gamma in dict.fromkeys(options.drafts)
    ]
    shown = [
        {
            **vars(point),
            "latency_ratio": point.latency_ratio,
            "acceptance_ratio": point.acceptance_ratio,
            "advantage": point.advantage,
        }
        for point in points
    ]
    return {"stream_cost": cost, "latencies": list(_LATENCIES), "lines": lines, "points": shown}


def read_points(path: Path) -> list[Point]:
    """Return the points that ``two-models`` has measured, none where it has not run."""
    if not path.is_file():
        return []
    try:
        table = json.loads(path.read_bytes())
        found = [point for task in table["tasks"] for point in points_of(task)]
    except (ValueError, KeyError, TypeError):
        raise InvalidOption(f"{path}: is not of this version's two-models; make that table again") from None
    if any(not 0 < value < math.inf for point in found for value in list(vars(point).values())[2:]):
        raise InvalidOption(f"{path}: has costs or tokens that are not positive; make that table again")
    return found


def points_of(task: Mapping[str, Any]) -> list[Point]:
    """Return a draft model's points beside the streams of a task of `train.talks.two_models`."""
    rows: Sequence[Mapping[str, Any]] = task["rows"]
    plain, streams = ({row["kind"]: row for row in rows}[kind] for kind in ("plain", "streams"))
    step = {row["strategy"]: row["ms"] / row["target_calls"] for row in rows}
    found = []
    for row in rows:
        if row["kind"] != "draft model":
            continue
        gamma = row["draft_calls"] / row["target_calls"]
        # What a step takes beside its drafts is a pass of the target over gamma + 1 tokens, no less than over one; on a
        # busy machine the costs, which are timed apart, may say less.
        target = step[plain["strategy"]] * max(1.0, task["verify_cost"])
        draft = max((step[row["strategy"]] - target) / gamma, 1e-3 * target)
        stream = step[streams["strategy"]]
        tokens = row["tokens_per_call"], streams["tokens_per_call"]
        found.append(Point(task["task"], row["name"], round(gamma), draft, target, stream, *tokens))
    return found


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    titles = ["task", "draft model", "gamma", "C_draft / C_target", "zeta / beta", "break-even at", "streams are"]
    found = []
    for one in table["points"]:
        equal = break_even(one["gamma"], one["latency_ratio"], one["stream_cost"] / one["target_cost"])
        cells = [f"{one['latency_ratio']:.2f}", f"{one['acceptance_ratio']:.2f}", f"{equal:.2f}"]
        found.append([one["task"], one["drafter"], str(one["gamma"]), *cells, f"{one['advantage']:.2f}x as fast"])
    if not found:
        for line in table["lines"]:
            for at in (0, len(table["latencies"]) // 2, -1):
                cells = [f"{table['latencies'][at]:.2f}", "", f"{line['zeta_over_beta'][at]:.2f}"]
                found.append(["", "", str(line["gamma"]), *cells, ""])
    return [titles, *found]


_MARKS: Mapping[int, str] = MappingProxyType(dict(enumerate("os^Dv")))


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw the lines of break-even, a draft model above them and streams below, and the points."""
    axes = figure.subplots()
    for line in table["lines"]:
        axes.plot(table["latencies"], line["zeta_over_beta"], label=f"as fast, {line['gamma']} drafts")
    drafters = list(dict.fromkeys(one["drafter"] for one in table["points"]))
    for number_of, drafter in enumerate(drafters):
        own = [one for one in table["points"] if one["drafter"] == drafter]
        places = [one["latency_ratio"] for one in own], [one["acceptance_ratio"] for one in own]
        gamma = own[0]["gamma"]
        label = f"{drafter}, {gamma} drafts"
        axes.plot(*places, _MARKS[number_of % len(_MARKS)], color="black", fillstyle="none", label=label)
        for one in own:
            place = one["latency_ratio"], one["acceptance_ratio"]
            axes.annotate(one["task"], place, xytext=(5, 3), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlabel("latency of the draft model / of the target")
    axes.set_ylabel("tokens a verification: draft model / streams")
    axes.set_title(
        f"above a line the draft model is faster, below it streams (C_ss / C_target {table['stream_cost']:.2f})"
    )
    axes.legend()
