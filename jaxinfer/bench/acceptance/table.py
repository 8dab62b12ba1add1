"""Formats an acceptance report as text."""

from collections.abc import Iterator

from jaxinfer.bench.acceptance.measure import AcceptanceReport, BatchReport
from jaxinfer.bench.acceptance.tally import Tally
from jaxinfer.bench.columns import align

_TITLES = (
    "strategy",
    "prompts",
    "nodes",
    "tokens/step",
    "target passes",
    "drafted",
    "accepted",
    "by depth",
    "tok/s",
    "net speed-up",
    "predicted",
)
# More columns of acceptance rates would not fit a line.
_MOST_DEPTHS = 6


def acceptance_lines(report: AcceptanceReport) -> list[str]:
    """Return the report's lines: the setup, then for each batch size the costs of a step and a table."""
    lines = [
        f"{report.model} ({report.dtype}) on {report.device} ({report.cores} cores): {report.prompts} prompts, up to "
        f"{report.max_new_tokens} new tokens each, temperature {report.temperature:g}, medians of {report.repeats}"
    ]
    if not report.complete:
        lines.append("stopped early: what follows is of the prompts that were done")
    for batch in report.batches:
        lines += ["", *_batch_lines(batch)]
    lines += ["", "by depth: the share of steps that accepted a draft 1, 2, ... deep; predicted: by these steps' cost"]
    return lines


def _batch_lines(report: BatchReport) -> list[str]:
    costs = "  ".join(f"{nodes}: {cost:.2f}" for nodes, cost in report.costs.items())
    first = f"batch {report.batch}: a step of one node takes {report.one_node_seconds * 1e3:.1f} ms with "
    lines = [f"{first}{report.slots} cache slots; steps of more nodes, against it: {costs}"]
    return [*lines, *align(_TITLES, list(_rows(report)), num_left=2)] if report.groups else lines


def _rows(report: BatchReport) -> Iterator[list[str]]:
    for one in report.strategies:
        yield [one.strategy, f"all {one.overall.prompts}", str(one.nodes), *_cells(one.overall)]
    for one in report.strategies:
        for category, tally in one.categories.items():
            yield [one.strategy, f"{tally.prompts} {category}", str(one.nodes), *_cells(tally)]


def _cells(tally: Tally) -> list[str]:
    shares = [f"{share:.0%}" for share in tally.acceptance_by_depth[:_MOST_DEPTHS]]
    more = ["..."] if len(tally.acceptance_by_depth) > _MOST_DEPTHS else []
    return [
        f"{tally.tokens_per_step:.2f}",
        f"{tally.target_passes:.0f}",
        str(tally.drafted),
        f"{tally.accepted / tally.drafted:.0%}" if tally.drafted else "-",
        " ".join(shares + more) or "-",
        _shown(tally.tokens_per_second, "{:.1f}"),
        _shown(tally.speed_up, "{:.2f}x"),
        _shown(tally.predicted_speed_up, "{:.2f}x"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
