"""Formats a latency report as text."""

from collections.abc import Iterator

from jaxinfer.bench.columns import align
from jaxinfer.bench.latency.measure import LatencyReport, Run, Speed

_TITLES = (
    "dtype",
    "",
    "prefill tok/s",
    "of roofline",
    "decode tok/s",
    "of roofline",
    "GB/s",
    "of bandwidth",
    "first token s",
    "compile s",
)


def latency_lines(report: LatencyReport) -> list[str]:
    """Return the report's lines: the setup, the machine's limits, and rows for each dtype."""
    work = report.workload
    lines = [
        f"{report.model} on {report.device} ({report.cores} cores): {work.batch} x {work.prompt_tokens} prompt tokens, "
        f"{work.new_tokens} new ones each, medians of {work.repeats}",
        f"memory bandwidth {report.bandwidth.bytes_per_second / 1e9:.1f} GB/s ({report.bandwidth.method})",
    ]
    for run in report.runs:
        lines.append(
            f"{run.dtype}: products {run.operations_per_second / 1e9:.0f} GFLOP/s; a decode step must read "
            f"{run.decode_bytes_per_step / 1e6:.0f} MB; roofline: prefill {run.prefill_roofline:.0f} tok/s, "
            f"decode {run.decode_roofline:.1f} tok/s"
        )
        if run.decode_bubble:
            lines.append(
                f"{run.dtype}: stages idle for {run.prefill_bubble:.0%} of a prefill, {run.decode_bubble:.0%} of a step"
            )
    rows = [row for run in report.runs for row in _rows(run)]
    return [*lines, "", *align(_TITLES, rows, num_left=2)]


def _rows(run: Run) -> Iterator[list[str]]:
    yield [run.dtype, "jaxinfer", *_cells(run, run.jaxinfer), f"{run.jaxinfer.compile_seconds:.1f}"]
    if run.transformers is not None and run.ratios is not None:
        yield [run.dtype, "transformers", *_cells(run, run.transformers), "-"]
        prefill, decode, first = (f"{run.ratios[name]:.2f}x" for name in ("prefill", "decode", "first_token"))
        yield ["", "ratio", prefill, "", decode, "", "", "", first, ""]


def _cells(run: Run, speed: Speed) -> list[str]:
    return [
        f"{speed.prefill_tokens_per_second:.1f}",
        f"{speed.prefill_tokens_per_second / run.prefill_roofline:.0%}",
        f"{speed.decode_tokens_per_second:.1f}",
        f"{speed.decode_tokens_per_second / run.decode_roofline:.0%}",
        f"{speed.bytes_per_second / 1e9:.1f}",
        f"{speed.share_of_bandwidth:.0%}",
        f"{speed.first_token_seconds:.3f}",
    ]
