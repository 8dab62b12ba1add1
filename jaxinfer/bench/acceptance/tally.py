"""Adds up the results of groups of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.decoding.strategy import Strategy
from jaxinfer.planning.cost_model import StepCosts, step_seconds
from jaxinfer.results import GenerationStats


@dataclass(frozen=True)
class Group:
    """One batch of prompts, run with every strategy: the counters of each row, and the median of its decoding seconds.

    Rows past ``categories`` only fill the batch: they count for time only.
    """

    batch: int
    categories: tuple[str, ...]
    stats: dict[str, tuple[GenerationStats, ...]]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Tally:
    """Sums over prompts. ``tokens`` counts decoded tokens: all but the first, which prefill draws.

    ``acceptance_by_depth`` is the share of steps that accepted a draft at each depth. ``speed_up`` is the decoded
    tokens per second over the baseline's, and ``predicted_speed_up`` is the cost model's value for it. Only whole
    batches are timed: rates and speed-ups are None for a part of a batch, and where no token was decoded.
    """

    prompts: int
    tokens: int
    steps: int
    tokens_per_step: float
    target_passes: float
    drafted: int
    accepted: int
    acceptance_by_depth: tuple[float, ...]
    tokens_per_second: float | None
    speed_up: float | None
    predicted_speed_up: float | None


def add_up(
    groups: Sequence[Group],
    category: str | None,
    name: str,
    baseline: str,
    strategy: Strategy,
    costs: StepCosts,
    drafter: float,
) -> Tally:
    """Add up one strategy's rows, or those of one category; ``drafter`` is a draft model's seconds per token."""
    rows = _rows(groups, category, name)
    tokens, steps = _decoded(rows), sum(row.steps for row in rows)
    passes, drafted = sum((row.target_passes for row in rows), 0.0), sum(row.drafted for row in rows)
    depth = max((len(row.accepted_by_depth) for row in rows), default=0)
    by_depth = [
        sum(row.accepted_by_depth[at] for row in rows if at < len(row.accepted_by_depth)) for at in range(depth)
    ]
    rate = speed_up = predicted = None
    whole = [group for group in groups if category is None or set(group.categories) == {category}]
    if steps and (category is None or all(group in whole for group in groups if category in group.categories)):
        seconds = step_seconds(costs, strategy, passes / steps, drafted / steps, drafter)
        rate = _rate(whole, name, sum(group.seconds[name] for group in whole))
        plain = _rate(whole, baseline, sum(group.seconds[baseline] for group in whole))
        speed_up = rate / plain if rate and plain else None
        expected = _rate(whole, name, seconds * _steps(whole, name))
        expected_plain = _rate(whole, baseline, costs.of(1) * _steps(whole, baseline))
        predicted = expected / expected_plain if expected and expected_plain else None
    return Tally(
        prompts=len(rows),
        tokens=tokens,
        steps=steps,
        tokens_per_step=tokens / steps if steps else 0.0,
        target_passes=passes,
        drafted=drafted,
        accepted=sum(row.accepted for row in rows),
        acceptance_by_depth=tuple(count / steps if steps else 0.0 for count in by_depth),
        tokens_per_second=rate,
        speed_up=speed_up,
        predicted_speed_up=predicted,
    )


def _rows(groups: Sequence[Group], category: str | None, name: str) -> list[GenerationStats]:
    return [
        row
        for group in groups
        for row, kind in zip(group.stats[name], group.categories)
        if category is None or kind == category
    ]


def _decoded(rows: Sequence[GenerationStats]) -> int:
    return sum(row.new_tokens - 1 for row in rows)


def _steps(groups: Sequence[Group], name: str) -> int:
    """Return the steps that the batches took. A batch takes as many steps as its slowest row."""
    return sum(max(row.steps for row in group.stats[name]) for group in groups)


def _rate(groups: Sequence[Group], name: str, seconds: float) -> float | None:
    return sum(_decoded(group.stats[name]) for group in groups) / seconds if seconds else None
