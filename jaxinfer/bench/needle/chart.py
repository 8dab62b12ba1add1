"""Draws a measurement of needles; needs matplotlib, which is optional."""

from pathlib import Path

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.bench.needle.measure import WAYS, NeedleReport


def draw_needles(report: NeedleReport, path: Path) -> None:
    """Draw for each length the share of facts found over the time of a token, by cache; numbers are tokens read.

    `jaxinfer.bench.chart_file.check_chart` has approved of the path.
    """
    # Imported here: it is optional, and nothing else needs it. No pyplot, which would keep state and look for a screen.
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(point.length for point in report.points))
    figure = Figure(figsize=(1 + 4 * len(lengths), 4), layout="constrained")
    figure.suptitle(f"{report.model} ({report.dtype}, {report.device})")
    for axes, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths):
        for way in WAYS:
            points = [point for point in report.points if (point.length, point.way) == (length, way)]
            milliseconds = [1e3 * point.seconds for point in points]
            axes.plot(milliseconds, [point.accuracy for point in points], marker="o", label=way)
            for at, point in zip(milliseconds, points):
                axes.annotate(str(point.budget), (at, point.accuracy), textcoords="offset points", xytext=(4, 4))
        axes.set_xlabel("milliseconds a token")
        axes.set_ylabel("facts found")
        axes.set_ylim(-0.05, 1.1)
        axes.set_title(f"texts of {length} tokens")
        axes.legend()
    save_chart(figure, path)
