"""Formats a measurement of needles as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.needle.measure import NeedleReport


def needle_lines(report: NeedleReport) -> list[str]:
    """Return the report's lines: a row for each cache and length, and the attention of the best keys by layer."""
    title = (
        f"{report.model} in {report.dtype} on {report.device} ({report.cores} cores), {report.others} other facts; "
        "milliseconds are of a token"
    )
    rows = [
        [
            point.way,
            str(point.length),
            str(point.budget),
            f"{point.found} of {point.texts}",
            " ".join(f"{depth:g}:{found}" for depth, found in point.by_depth),
            f"{1e3 * point.seconds:.2f}",
        ]
        for point in report.points
    ]
    columns = ("cache", "length", "tokens read", "found", "found by depth", "ms")
    best = " ".join(f"{mass:.1%}" for mass in report.mass)
    mean = sum(report.mass) / len(report.mass)
    return [
        title,
        "",
        *align(columns, rows, num_left=1),
        "",
        f"attention of the best {report.mass_share:.0%} of {report.mass_length} keys, by layer: {best}",
        f"in the mean {mean:.1%}",
    ]
