"""Formats a throughput report as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.throughput.measure import Load, ThroughputReport, load_name

_TITLES = ("load", "requests", "tokens", "tok/s", "ratio", "first p50 s", "first p99 s", "token p50 ms", "token p99 ms")


def throughput_lines(report: ThroughputReport) -> list[str]:
    """Return the report's lines; ``ratio`` is to the static batches of as many rows."""
    static = {load.size: load.tokens_per_second for load in report.loads if load.kind == "static"}
    lines = [
        f"{report.model} in {report.dtype} on {report.device} ({report.cores} cores), {report.strategy}: up to "
        f"{report.max_new_tokens} new tokens each, medians of {report.repeats}"
    ]
    return [*lines, "", *align(_TITLES, [_row(load, static) for load in report.loads], num_left=1)]


def _row(load: Load, static: dict[float, float]) -> list[str]:
    has_ratio = load.kind == "clients" and load.size in static
    return [
        load_name(load.kind, load.size),
        str(load.requests),
        f"{load.output_tokens:g}",
        f"{load.tokens_per_second:.1f}",
        f"{load.tokens_per_second / static[load.size]:.2f}x" if has_ratio else "",
        *("" if value is None else f"{value:.2f}" for value in (load.first_token_p50, load.first_token_p99)),
        *("" if value is None else f"{1000 * value:.1f}" for value in (load.token_p50, load.token_p99)),
    ]
