"""Draws a quality report: perplexity over the bytes of all parameters."""

from pathlib import Path
from typing import Any

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.bench.quality.measure import QualityReport

# From this ratio of the worst to the best on, perplexities are drawn by their logarithm.
_MUCH = 4


def draw_quality(report: QualityReport, path: Path) -> None:
    """Draw the report, which has perplexities; `jaxinfer.bench.chart_file.check_chart` has approved of the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    figure.suptitle(f"{report.model}: {report.scored_tokens} tokens, context {report.context}")
    axes: Any = figure.subplots()
    perplexities: list[float] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    for each in report.results:
        assert each.perplexity is not None
        perplexities.append(each.perplexity)
        place = each.num_bytes / 1e6, each.perplexity
        bits, _, group = each.weights.partition(" bits:")
        if group:
            curves.setdefault(group, []).append(place)
        else:
            axes.plot(*place, "o", color="C0")
        axes.annotate(bits if group else each.weights, place, xytext=(4, 4), textcoords="offset points")
    for number, (group, places) in enumerate(curves.items(), 1):
        axes.plot(*zip(*sorted(places)), "o-", color=f"C{number}", label=f"bits by {group}")
    if max(perplexities) > _MUCH * min(perplexities):
        axes.set_yscale("log")
    if curves:
        axes.legend()
    axes.set_xlabel("MB of parameters")
    axes.set_ylabel("perplexity")
    axes.margins(x=0.15, y=0.15)
    save_chart(figure, path)
