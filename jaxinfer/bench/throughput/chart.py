"""Draws a throughput report: the engine beside what it is compared with, by clients or by the spread of lengths."""

from pathlib import Path
from typing import Any

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.bench.throughput.measure import ThroughputReport
from jaxinfer.bench.throughput.table import compared_speeds

_NAMES = {"clients": "engine", "static": "static batches", "undrafted": "engine without drafts"}


def draw_throughput(report: ThroughputReport, path: Path) -> None:
    """Draw the report; `jaxinfer.bench.chart_file.check_chart` has approved of the path."""
    from matplotlib.figure import Figure

    spreads = [load.spread for load in report.loads if load.spread is not None]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    figure.suptitle(f"{report.model} ({report.dtype}) on {report.cores} cores, {report.strategy}")
    axes: Any = figure.subplots()
    most = max(load.size for load in report.loads if load.kind == "clients")
    for kind, name in _NAMES.items():
        loads = [load for load in report.loads if load.kind == kind and (not spreads or load.size == most)]
        if not loads:
            continue
        places = [load.spread if spreads else load.size for load in loads]
        axes.plot(places, [load.tokens_per_second for load in loads], marker="o", label=name)
    compared = compared_speeds(report)
    for load in report.loads:
        if load.kind == "clients" and (not spreads or load.size == most):
            gain = load.tokens_per_second / compared[load.size, load.spread]
            place = load.spread if spreads else load.size
            above = place, load.tokens_per_second
            axes.annotate(f"{gain:.2f}x", above, xytext=(0, 6), textcoords="offset points", ha="center")
    axes.set_xlabel(f"standard deviation / mean of lengths, {most:g} at once" if spreads else "requests at once")
    axes.set_ylabel("output tokens a second")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.legend()
    save_chart(figure, path)
