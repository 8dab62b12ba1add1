"""Chooses window by window how many nodes a step verifies: by what steps cost, and what each sequence gains from them.

Drafts change no token, so the choice may follow the clock. It is policy only: no JAX, and no clock of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.engine.sequence import EngineSequence

# Windows of each number of nodes that are measured first; the first one of a program is slower than the next.
_TRIALS = 2
# How much the newest window counts in what a step costs.
_NEWEST_COST = 0.25
# How much the newest step counts in what one sequence gains, and in what all of them gain.
_NEWEST_GAIN, _NEWEST_USUAL = 0.05, 0.01
# Where drafting has lost it is tried again after so many steps, and after twice as many each time that it loses again.
_FIRST_REST, _LONGEST_REST = 64, 1024
# What other numbers of nodes cost is measured anew after so many steps.
_LONGEST_WITHOUT = 2048
# The fewest drafted tokens a step that others are compared with.
_LEAST_EXTRA = 0.05
_PLAIN = 1


@dataclass
class _Seen:
    """What windows of one number of rows have shown, by nodes a step.

    ``costs`` are seconds a step, ``ages`` the steps since a window of so many nodes. Drafting that does not pay rests
    for ``rest`` steps.
    """

    costs: dict[int, float] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    rest: int = _FIRST_REST


class Pace:
    """Chooses among ``widths``, numbers of nodes that ascend from 1, for sequences that may draft.

    Costs are by powers of two of rows, as programs are. What a sequence gains is a factor of what is usual for so many
    nodes, so that windows of few nodes tell what it would gain from many.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._by_rows: dict[int, _Seen] = {}
        self._usual: dict[int, float] = {}

    def nodes(self, sequences: Sequence[EngineSequence], ready: Sequence[int] | None = None) -> int:
        """Return how many nodes the next window's steps should verify, of those whose programs are ``ready``."""
        seen, ready = self._seen(sequences), self._widths if ready is None else ready
        for width in sorted(ready, reverse=True):
            if not self._is_known(seen, width):
                return width
        best = max(ready, key=lambda width: self._rate(sequences, seen, width))
        drafting = [width for width in ready if width != _PLAIN]
        for width in sorted(ready, key=lambda width: -self._rate(sequences, seen, width)):
            is_next_best = best == _PLAIN and bool(drafting) and width == self._best_of(sequences, seen, drafting)
            if width != best and seen.ages.get(width, 0) >= (seen.rest if is_next_best else _LONGEST_WITHOUT):
                return width
        return best

    def ran(self, sequences: Sequence[EngineSequence], nodes: int, steps: int, seconds: float) -> None:
        """Note what a window took, after what its sequences have `gained`."""
        seen, cost = self._seen(sequences), seconds / max(steps, 1)
        before = seen.costs.get(nodes, cost)
        is_trial = not self._is_known(seen, nodes)
        seen.costs[nodes] = min(before, cost) if is_trial else before + _NEWEST_COST * (cost - before)
        seen.windows[nodes] = seen.windows.get(nodes, 0) + 1
        for width in self._widths:
            seen.ages[width] = 0 if width == nodes else seen.ages.get(width, 0) + steps
        if nodes != _PLAIN and not is_trial and _PLAIN in seen.costs:
            pays = self._best_of(sequences, seen, list(seen.costs)) != _PLAIN
            seen.rest = _FIRST_REST if pays else min(2 * seen.rest, _LONGEST_REST)

    def gained(self, sequence: EngineSequence, nodes: int, tokens: int, steps: int) -> None:
        """Note how many tokens a sequence got from so many steps of ``nodes`` nodes."""
        if not steps:
            return
        found = tokens / steps
        usual = self._usual.get(nodes, found)
        factor = (found - 1) / max(usual - 1, _LEAST_EXTRA)
        sequence.gain = _moved(sequence.gain, factor, steps, _NEWEST_GAIN)
        self._usual[nodes] = _moved(usual, found, steps, _NEWEST_USUAL)

    def tokens_per_step(self, sequence: EngineSequence, nodes: int) -> float:
        """Return how many tokens a step of so many nodes should give a sequence."""
        if nodes == _PLAIN:
            return 1.0
        return min(float(nodes), 1 + sequence.gain * max(self._usual.get(nodes, 1.0) - 1, _LEAST_EXTRA))

    def costs(self) -> dict[str, dict[str, float]]:
        """Return the seconds a step that have been measured, by powers of two of rows and by nodes."""
        return {
            str(power): {str(width): seen.costs[width] for width in self._widths if self._is_known(seen, width)}
            for power, seen in sorted(self._by_rows.items())
        }

    def begin_with(self, costs: Any) -> bool:
        """Take over what `costs` has returned, so that nothing is tried for it; False for anything else."""
        try:
            found = {int(power): {int(width): float(each[width]) for width in each} for power, each in costs.items()}
        except (AttributeError, TypeError, ValueError):
            return False
        whole = all(set(each) <= set(self._widths) and all(map(_is_cost, each.values())) for each in found.values())
        if whole:
            for power, each in found.items():
                self._by_rows[power] = _Seen(each, dict.fromkeys(each, _TRIALS))
        return whole

    def _is_known(self, seen: _Seen, width: int) -> bool:
        return seen.windows.get(width, 0) >= _TRIALS

    def _best_of(self, sequences: Sequence[EngineSequence], seen: _Seen, widths: Sequence[int]) -> int:
        return max(widths, key=lambda width: self._rate(sequences, seen, width))

    def _rate(self, sequences: Sequence[EngineSequence], seen: _Seen, nodes: int) -> float:
        """Return tokens a second."""
        return sum(self.tokens_per_step(each, nodes) for each in sequences) / max(seen.costs[nodes], 1e-9)

    def _seen(self, sequences: Sequence[EngineSequence]) -> _Seen:
        return self._by_rows.setdefault((len(sequences) - 1).bit_length(), _Seen())


def _is_cost(seconds: float) -> bool:
    return 0 < seconds < float("inf")


def _moved(before: float, newest: float, steps: int, share: float) -> float:
    """Return a mean in which each newest step counts for a share."""
    return before + (1 - (1 - share) ** steps) * (newest - before)
