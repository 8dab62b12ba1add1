"""Draws an acceptance report as a PNG file. Needs matplotlib, which is optional."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from jaxinfer.bench.acceptance.measure import BASELINE, AcceptanceReport, BatchReport
from jaxinfer.errors import InvalidOption


def check_chart(path: Path, option: str = "--chart") -> None:
    """Raise InvalidOption if the chart cannot be written; ``option`` is the flag that asks for it."""
    if path.suffix.lower() != ".png":
        raise InvalidOption(f"{option} {path}: the chart is a PNG file; let its name end in .png")
    if path.is_dir() or (path.parent.is_dir() and not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise InvalidOption(f"{option} {path}: cannot be written; name another file")
    if not path.parent.is_dir():
        raise InvalidOption(f"{option} {path}: there is no folder {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidOption(f'{option} needs matplotlib: pip install "jaxinfer[bench]" or leave {option} out')


def draw_chart(report: AcceptanceReport, path: Path) -> None:
    """Draw, for each batch size, the measured and predicted speed-ups and the acceptance rate by depth."""
    # Imported here: matplotlib is optional. No pyplot: it keeps state and looks for a screen.
    from matplotlib.figure import Figure

    batches = [batch for batch in report.batches if batch.groups]
    figure = Figure(figsize=(12, 1 + 4 * max(1, len(batches))), layout="constrained")
    figure.suptitle(f"{report.model} ({report.dtype}) on {report.device}, temperature {report.temperature:g}")
    axes = figure.subplots(max(1, len(batches)), 2, squeeze=False)
    for (speed, depth), batch in zip(axes, batches):
        _draw_speed(speed, batch)
        _draw_depths(depth, batch)
    figure.savefig(path, format="png", dpi=120)


def _draw_speed(axes: Any, batch: BatchReport) -> None:
    shown = [one for one in batch.strategies if one.strategy != BASELINE]
    places = range(len(shown))
    width = 0.4
    for offset, label, values in (
        (-width / 2, "measured", [one.overall.speed_up for one in shown]),
        (width / 2, "predicted by the cost model", [one.overall.predicted_speed_up for one in shown]),
    ):
        axes.bar([place + offset for place in places], [value or 0.0 for value in values], width, label=label)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(list(places), [one.strategy.replace(":", ":\n").replace(",", ",\n") for one in shown])
    axes.set_ylabel("times plain decoding")
    axes.set_title(f"batch {batch.batch}: net speed-up")
    axes.legend()


def _draw_depths(axes: Any, batch: BatchReport) -> None:
    for one in batch.strategies:
        shares = one.overall.acceptance_by_depth
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=one.strategy)
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1)
    axes.set_title(f"batch {batch.batch}: acceptance by depth")
    if axes.lines:
        axes.legend()
