"""Formats a quality report as text."""

from jaxinfer.bench.columns import align
from jaxinfer.bench.quality.measure import Quality, QualityReport

_TITLES = ("weights", "MB", "perplexity", "change", "KL", "same token", "exact", "decode tok/s")


def quality_lines(report: QualityReport) -> list[str]:
    """Return the report's lines; ``change`` is of perplexity, against the weights as they are."""
    parts = []
    if report.scored_tokens:
        parts.append(f"{report.scored_tokens} tokens in windows of {report.context}, stride {report.stride}")
    if report.questions:
        parts.append(f"{report.questions} questions")
    title = f"{report.model} in {report.dtype} on {report.device} ({report.cores} cores): {', '.join(parts)}"
    first, *_ = report.results
    early = [] if report.complete else ["stopped early: what follows is what was done"]
    return [title, *early, "", *align(_TITLES, [_row(each, first) for each in report.results], num_left=1)]


def _row(one: Quality, first: Quality) -> list[str]:
    change = None
    if one.perplexity is not None and first.perplexity is not None and one is not first:
        change = one.perplexity / first.perplexity - 1
    return [
        one.weights,
        f"{one.num_bytes / 1e6:.1f}",
        _shown(one.perplexity, "{:.4f}"),
        _shown(change, "{:+.2%}"),
        _shown(one.divergence, "{:.5f}"),
        _shown(one.agreement, "{:.2%}"),
        _shown(one.exact_matches, "{:.1%}"),
        _shown(one.decode_tokens_per_second, "{:.1f}"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
