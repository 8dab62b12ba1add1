"""Predicts what a strategy gains on this device: the tokens per step against the cost of a step's nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.decoding.strategies.cascade import Cascade
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.decoding.tuning.tree_cost import NODE_COUNTS, measure_costs
from jaxinfer.models.decoder import Decoder
from jaxinfer.notation import Params


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step by its number of nodes per row, for ``rows`` rows with ``slots`` cache slots each."""

    rows: int
    slots: int
    seconds: dict[int, float]

    def of(self, nodes: int) -> float:
        """Return the seconds of a step: interpolated between the measured sizes, extrapolated from the last two."""
        sizes = sorted(self.seconds)
        costs = [self.seconds[size] for size in sizes]
        if nodes > sizes[-1] and len(sizes) > 1:
            slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
            return costs[-1] + max(slope, 0.0) * (nodes - sizes[-1])
        return float(np.interp(nodes, sizes, costs))

    @property
    def relative(self) -> dict[int, float]:
        """The cost of each step, relative to a step of one node."""
        return {nodes: seconds / self.of(1) for nodes, seconds in sorted(self.seconds.items())}


def measure_step_costs(
    decoder: Decoder, params: Params, rows: int, slots: int, node_counts: Sequence[int] = NODE_COUNTS
) -> StepCosts:
    """Compile and time steps of each number of nodes; one node is always included."""
    counts = sorted({1, *node_counts})
    return StepCosts(rows, slots, measure_costs(decoder, params, counts, num_slots=slots, num_rows=rows))


def acceptance_needed(cost: float, depth: int) -> float | None:
    """Return the acceptance rate at which a step that costs ``cost`` plain steps breaks even.

    The drafts are a chain of ``depth`` tokens. Each is accepted with the same probability a if the one before it was,
    so a step gives 1 + a + ... + a^depth tokens (Leviathan et al., 2211.17192). None if even a = 1 does not break even.
    """
    if cost <= 1:
        return 0.0
    if cost > depth + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        tokens = sum(middle**count for count in range(depth + 1))
        low, high = (middle, high) if tokens < cost else (low, middle)
    return high


def drafter_seconds(strategy: Strategy, rows: int, slots: int) -> float:
    """Return the seconds per token of a resolved strategy's draft models, 0 if it has none.

    Those of a cascade, whose steps give a token or more each, are the most that they may be. One that takes turns with
    a model that decodes ahead is taken for that one.
    """
    strategy = strategy.ahead or strategy
    parts = strategy.parts if isinstance(strategy, SumOfDrafters) else (strategy,)
    total = 0.0
    for part in parts:
        if isinstance(part, DraftModel | Cascade) and part.config is not None and part.backend is not None:
            nodes = part.drafter.num_nodes if isinstance(part, Cascade) else 1
            decoder = Decoder(part.config, part.backend)
            total += measure_costs(decoder, part.params, (nodes,), num_slots=slots, num_rows=rows)[nodes]
    return total


def step_seconds(
    costs: StepCosts, strategy: Strategy, passes_per_step: float, drafted_per_step: float, drafter: float
) -> float:
    """Return the predicted seconds of a step: verification at the strategy's width, plus drafting, token by token.

    Drafting costs the reads of the target's blocks beyond verification, and ``drafter`` seconds per drafted token.
    Heads, lookups and the choice of the tree count as free. One that takes turns with a model that decodes ahead is
    taken for that one.
    """
    drafting = max(0.0, passes_per_step - 1.0) * costs.of(1) + drafted_per_step * drafter
    return costs.of((strategy.ahead or strategy).num_nodes) + drafting
