"""Formats a measurement of search as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.search.measure import SearchReport


def search_lines(report: SearchReport) -> list[str]:
    """Return the report's lines: what it was made on, and a row for each task, way and budget."""
    title = (
        f"{report.model} in {report.dtype} on {report.device} ({report.cores} cores), temperature "
        f"{report.temperature:g}, {report.actions} actions; tokens and seconds are a problem's"
    )
    rows = [
        [
            point.task,
            point.way,
            str(point.texts),
            f"{point.right} of {point.problems}",
            f"{point.worth:.3f}",
            f"{point.tokens:.0f}",
            f"{point.seconds / point.problems:.2f}",
        ]
        for point in report.points
    ]
    return [title, "", *align(("task", "way", "texts", "right", "worth", "tokens", "seconds"), rows, num_left=2)]
