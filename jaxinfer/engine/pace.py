"""Chooses window by window whether to draft: by what steps were seen to cost, and what each sequence gains from drafts.

Drafts change no token, so the choice may follow the clock. It is policy only: no JAX, and no clock of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.engine.sequence import EngineSequence

# Windows of each kind that are measured first; the first one of a program is slower than the next.
_TRIALS = 2
# How much the newest window counts in what a step costs.
_NEWEST_COST = 0.25
# How much the newest step counts in what one sequence gains, and in what sequences gain that have not drafted yet.
_NEWEST_GAIN, _NEWEST_USUAL = 0.05, 0.01
# Where drafting has lost it is tried again after so many steps, and after twice as many each time that it loses again.
_FIRST_REST, _LONGEST_REST = 64, 1024
# Where it wins, what plain steps cost is measured anew after so many.
_LONGEST_DRAFTING = 2048


@dataclass
class _Seen:
    """What windows of one number of rows have shown; by kind, whether they drafted.

    ``costs`` are seconds a step, ``ages`` the steps of the other kind since a window of this one. Drafting that does
    not pay rests for ``rest`` steps.
    """

    costs: dict[bool, float] = field(default_factory=dict)
    windows: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    ages: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    rest: int = _FIRST_REST


class Pace:
    """Chooses for windows of sequences that may draft. Costs are by powers of two of rows, as programs are."""

    def __init__(self) -> None:
        self._by_rows: dict[int, _Seen] = {}
        self._usual_gain: float | None = None

    def drafts(self, sequences: Sequence[EngineSequence]) -> bool:
        """Whether the next window of these sequences should draft."""
        seen = self._seen(sequences)
        for kind in (True, False):
            if seen.windows[kind] < _TRIALS:
                return kind
        if self._pays(sequences, seen):
            return seen.ages[False] < _LONGEST_DRAFTING
        return seen.ages[True] >= seen.rest

    def ran(self, sequences: Sequence[EngineSequence], drafted: bool, steps: int, seconds: float) -> None:
        """Note what a window took, after what its sequences have `gained`."""
        seen, cost = self._seen(sequences), seconds / max(steps, 1)
        before = seen.costs.get(drafted, cost)
        is_trial = seen.windows[drafted] < _TRIALS
        seen.costs[drafted] = min(before, cost) if is_trial else before + _NEWEST_COST * (cost - before)
        seen.windows[drafted] += 1
        seen.ages[drafted] = 0
        seen.ages[not drafted] += steps
        if drafted and not is_trial:
            seen.rest = _FIRST_REST if self._pays(sequences, seen) else min(2 * seen.rest, _LONGEST_REST)

    def gained(self, sequence: EngineSequence, tokens: int, steps: int) -> None:
        """Note how many tokens a sequence got from so many steps with drafts."""
        if steps:
            usual = _moved(self._usual_gain, tokens / steps, steps, _NEWEST_USUAL)
            before = self._usual_gain if sequence.gain is None else sequence.gain
            sequence.gain, self._usual_gain = _moved(before, tokens / steps, steps, _NEWEST_GAIN), usual

    def _pays(self, sequences: Sequence[EngineSequence], seen: _Seen) -> bool:
        usual = 1.0 if self._usual_gain is None else self._usual_gain
        gains = sum(usual if each.gain is None else each.gain for each in sequences)
        return gains * seen.costs[False] >= len(sequences) * seen.costs[True]

    def _seen(self, sequences: Sequence[EngineSequence]) -> _Seen:
        return self._by_rows.setdefault((len(sequences) - 1).bit_length(), _Seen())


def _moved(before: float | None, newest: float, steps: int, share: float) -> float:
    """Return a mean in which each newest step counts for a share, and the first ones for all."""
    return newest if before is None else before + (1 - (1 - share) ** steps) * (newest - before)
