"""Draws a quality report: perplexity over the bytes of all parameters."""

from pathlib import Path
from typing import Any

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.bench.quality.measure import QualityReport


def draw_quality(report: QualityReport, path: Path) -> None:
    """Draw the report, which has perplexities; `jaxinfer.bench.chart_file.check_chart` has approved of the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    figure.suptitle(f"{report.model}: {report.scored_tokens} tokens, context {report.context}")
    axes: Any = figure.subplots()
    for each in report.results:
        place = each.num_bytes / 1e6, each.perplexity
        axes.plot(*place, "o", color="C0")
        axes.annotate(each.weights, place, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("MB of parameters")
    axes.set_ylabel("perplexity")
    axes.margins(x=0.15, y=0.15)
    save_chart(figure, path)
