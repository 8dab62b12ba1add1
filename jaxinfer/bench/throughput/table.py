"""Formats a throughput report as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.throughput.measure import Load, ThroughputReport

_TITLES = ("load", "requests", "tokens", "tok/s", "ratio", "first p50 s", "first p99 s", "token p50 ms", "token p99 ms")


def throughput_lines(report: ThroughputReport) -> list[str]:
    """Return the report's lines; ``ratio`` is to the static batches of as many rows, or to as many without drafts."""
    compared = compared_speeds(report)
    lines = [
        f"{report.model} in {report.dtype} on {report.device} ({report.cores} cores), {report.strategy}: up to "
        f"{report.max_new_tokens} new tokens each, medians of {report.repeats}"
    ]
    if any(load.spread is not None for load in report.loads):
        lines[0] = lines[0].replace(": up to", ": on average")
    return [*lines, "", *align(_TITLES, [_row(load, compared) for load in report.loads], num_left=1)]


def compared_speeds(report: ThroughputReport) -> dict[tuple[float, float | None], float]:
    """Return the tokens a second of what clients are compared with, by their number and spread."""
    kinds = "static", "undrafted"
    return {(load.size, load.spread): load.tokens_per_second for load in report.loads if load.kind in kinds}


def _row(load: Load, compared: dict[tuple[float, float | None], float]) -> list[str]:
    size = load.size, load.spread
    has_ratio = load.kind == "clients" and size in compared
    return [
        str(load.key),
        str(load.requests),
        f"{load.output_tokens:g}",
        f"{load.tokens_per_second:.1f}",
        f"{load.tokens_per_second / compared[size]:.2f}x" if has_ratio else "",
        *("" if value is None else f"{value:.2f}" for value in (load.first_token_p50, load.first_token_p99)),
        *("" if value is None else f"{1000 * value:.1f}" for value in (load.token_p50, load.token_p99)),
    ]
