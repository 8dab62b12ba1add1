"""Draws a measurement of search; needs matplotlib, which is optional."""

from pathlib import Path

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.bench.search.measure import SearchReport


def draw_search(report: SearchReport, path: Path) -> None:
    """Draw for each task what answers are worth over the tokens that they took, by way to answer.

    `jaxinfer.bench.chart_file.check_chart` has approved of the path.
    """
    # Imported here: it is optional, and nothing else needs it. No pyplot, which would keep state and look for a screen.
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(point.task for point in report.points))
    figure = Figure(figsize=(1 + 4 * len(tasks), 4), layout="constrained")
    figure.suptitle(f"{report.model} ({report.dtype}), temperature {report.temperature:g}")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        for way in dict.fromkeys(point.way for point in report.points):
            points = [point for point in report.points if (point.task, point.way) == (task, way)]
            axes.plot([point.tokens for point in points], [point.worth for point in points], marker="o", label=way)
        axes.set_xscale("log")
        axes.set_xlabel("tokens run by the model, a problem")
        axes.set_ylabel("worth of the answer")
        axes.set_title(task)
        axes.legend()
    save_chart(figure, path)
