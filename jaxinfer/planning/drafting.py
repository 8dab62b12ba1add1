"""What `auto` would do on a TPU: how many nodes a step verifies, by the counted costs of steps, at some batch sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.decoding.fixed_rows import step_nodes
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.engine.pace import Pace
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.errors import InvalidOption
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, estimate_step
from jaxinfer.planning.roofline import roofline

_BATCHES = (1, 8, 64)
# What untrained drafters gave a step of 8 nodes on Spec-Bench, and more of it with more nodes, as trees of the shipped
# heads have it (`jaxinfer/bench/RESULTS.md`).
_DRAFTED = 0.57
_SHARES = {4: 0.8, 8: 1.0, 16: 1.2, 32: 1.4, 64: 1.55}


@dataclass(frozen=True)
class Drafting:
    """What a strategy that adapts would do for a batch.

    ``costs`` are plain steps that a step of so many nodes takes, which is also from how many tokens a step on it gains,
    and ``seconds`` those of a plain step, both by the roofline of what is counted. ``nodes`` is what it would verify of
    texts on which a step gives ``tokens_per_step``; 1 is to draft nothing. Where the batch does not fit or does not
    split, ``costs`` is empty and ``nodes`` None.
    """

    batch: int
    costs: Mapping[int, float]
    seconds: float
    nodes: int | None
    tokens_per_step: float


def plan_drafting(deployment: Deployment) -> list[Drafting]:
    """Return what the strategy of a deployment, which adapts, would do at a batch of 1, 8 and 64."""
    strategy = deployment.strategy
    narrower = strategy.narrower if isinstance(strategy, SumOfDrafters) else ()
    widths = (1, *(each.num_nodes for each in reversed(narrower)), strategy.num_nodes)
    return [_at(deployment, batch, widths) for batch in _BATCHES]


def _at(deployment: Deployment, batch: int, widths: tuple[int, ...]) -> Drafting:
    try:
        one = replace(deployment, batch=batch)
    except InvalidOption:
        return Drafting(batch, {}, 0.0, None, 1.0)
    footprint = count_footprint(one)
    if footprint.total_bytes > one.chip.device_hbm_bytes:
        return Drafting(batch, {}, 0.0, None, 1.0)
    # A step may be filled up to rows that give the same bits.
    filled = {width: step_nodes(one.strategy, width, one.split.backend) for width in widths}
    works = {width: estimate_step(one, footprint, nodes) for width, nodes in filled.items()}
    seconds = {width: roofline(work, one.chip, one.dtype).seconds for width, work in works.items()}
    pace, rows = Pace(widths), [EngineSequence(0, [0], 1, 0.0) for _ in range(batch)]
    pace.begin_with({(batch - 1).bit_length(): seconds})
    for width in widths[1:]:
        # One for all, so that each row is as usual.
        pace.gained(EngineSequence(0, [0], 1, 0.0), width, round(1000 * _tokens(width)), 1000)
    nodes = pace.nodes(rows)
    costs = {width: cost / seconds[1] for width, cost in seconds.items()}
    return Drafting(batch, costs, seconds[1], nodes, _tokens(nodes))


def _tokens(nodes: int) -> float:
    """Return how many tokens a step of so many nodes is taken to give."""
    if nodes == 1:
        return 1.0
    known = max((width for width in _SHARES if width <= nodes), default=min(_SHARES))
    return 1 + _DRAFTED * _SHARES[known]
