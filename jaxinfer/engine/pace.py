"""Chooses window by window how many nodes a step verifies: by what steps cost, and what each sequence gains from them.

Drafts change no token, so the choice may follow the clock. It is policy only: no JAX, and no clock of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.engine.sequence import EngineSequence

# Steps after which the choice is made anew, where it may change.
FEW_STEPS = 8
# Where somebody waits for a window's end, how much longer than as many plain steps it may take; and the steps of one
# whose drafts another model decodes, of which nothing is known but that they are long.
_LONGEST_BETWEEN, _STEPS_AHEAD = 2.0, 2
# Windows of each number of nodes that are measured first; the first one of a program is slower than the next.
_TRIALS = 2
# How much the newest window counts in what is common to all steps (other work on the machine and a longer text make all
# dearer), and in what those of its number of nodes cost beside others, which is seen where others ran just before. More
# than ``_FARTHEST`` times is no measure.
_NEWEST_COMMON, _NEWEST_OWN, _FARTHEST = 0.5, 0.5, 3.0
# In seconds, where a clock has not moved.
_LEAST_COST = 1e-9
# How much the newest step counts in what one sequence gains, at the least, and in what all of them gain. What is usual
# counts as so many steps of a sequence's own: it may gain far more or less, as 8 steps tell half.
_NEWEST_GAIN, _NEWEST_USUAL, _STEPS_OF_USUAL = 0.05, 0.01, 8
# By how much drafts may lose, going by what is usual, to be tried in a text that nothing is known of; and as much again
# while they have run in no more windows than the first trials.
_HOPE = 0.15
# Where drafting has lost it is tried again after so many steps, and after twice as many each time that it loses again.
_FIRST_REST, _LONGEST_REST = 64, 1024
# What other numbers of nodes cost is measured anew after so many steps, and what an earlier process has found after
# fewer: it may have shared the machine. What would be the best if it cost a fifth less is measured sooner too.
_LONGEST_WITHOUT, _LONGEST_CLOSE, _LONGEST_UNSEEN = 512, 256, 32
_CLOSE = 0.8
# The least chance of a draft that others are compared with, and what is supposed where no draft has been seen.
_LEAST_CHANCE, _FIRST_CHANCE = 0.05, 0.5
# The same of a model that decodes ahead: nobody has one that seldom draws what the target draws.
_FIRST_CHANCE_AHEAD = 0.9
# Halvings of the range in which a chance is looked for.
_HALVINGS = 20
_PLAIN = 1


@dataclass
class _Seen:
    """What windows of one number of rows have shown, by nodes a step.

    ``costs`` times what is ``common`` to all are seconds a step, ``ages`` the steps since a window of so many nodes.
    What is ``kept`` an earlier process has seen; then nothing common is known before the first window. The
    ``newest`` window's nodes tell whether others ran between. Drafting that does not pay rests for ``rest`` steps.
    """

    costs: dict[int, float] = field(default_factory=dict)
    common: float | None = 1.0
    newest: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    rest: int = _FIRST_REST


class Pace:
    """Chooses among ``widths``, numbers of nodes that ascend from 1, for sequences that may draft.

    Costs are by powers of two of rows, as programs are. What steps gain is held as the chance that the next draft is
    right, as if nodes were a chain: that is what few nodes and many have in common, also where nearly all drafts are
    taken. A sequence's chance is a factor of what is usual for so many nodes.

    ``ahead`` are the width, if there is one, whose drafts are what another model decodes, and the nodes of that model's
    own steps, for which the others' drafters draft: its chance is another one, and its steps tell that of the others.
    """

    def __init__(self, widths: Sequence[int], ahead: tuple[int, int] | None = None) -> None:
        self._widths = tuple(widths)
        self._ahead, self._own_nodes = (None, 0) if ahead is None else ahead
        self._by_rows: dict[int, _Seen] = {}
        # The usual chance by nodes, and the steps of all sequences that have shown it.
        self._usual: dict[int, float] = {}
        self._usual_steps: dict[int, int] = {}

    def nodes(self, sequences: Sequence[EngineSequence], ready: Sequence[int] | None = None) -> int:
        """Return how many nodes the next window's steps should verify, of those whose programs are ``ready``."""
        seen, ready = self._seen(sequences), self._widths if ready is None else ready
        for width in sorted(ready, reverse=True):
            if not self._is_known(seen, width):
                return width
        rates = {width: self._rate(sequences, seen, width) for width in ready}
        best = max(ready, key=lambda width: rates[width])
        drafting = [width for width in ready if width != _PLAIN]
        if best == _PLAIN and drafting:
            hopeful = max(drafting, key=lambda width: rates[width])
            if _hope(sequences, seen.windows[hopeful]) * rates[hopeful] > rates[_PLAIN]:
                return hopeful
        for width in sorted(ready, key=lambda width: -rates[width]):
            is_next_best = best == _PLAIN and bool(drafting) and width == self._best_of(sequences, seen, drafting)
            longest = _LONGEST_CLOSE if rates[width] >= _CLOSE * rates[best] else _LONGEST_WITHOUT
            longest = _LONGEST_UNSEEN if width in seen.kept else seen.rest if is_next_best else longest
            if width != best and seen.ages.get(width, 0) >= longest:
                return width
        return best

    @property
    def ahead(self) -> int | None:
        """The nodes that a model that decodes ahead has verified, if there is one: its steps are long."""
        return self._ahead

    def steps(self, sequences: Sequence[EngineSequence], nodes: int, most: int) -> int:
        """Return how many steps a window of so many nodes should have: at most ``most``, or `FEW_STEPS` for a trial.

        Half as many where drafts are seen, which may show that others are better. Plain steps show nothing.
        """
        seen, few = self._seen(sequences), min(most, FEW_STEPS)
        if not self._is_known(seen, nodes):
            return few
        known = [width for width in self._widths if self._is_known(seen, width)]
        if nodes != self._best_of(sequences, seen, known):
            return few
        return most if nodes == _PLAIN else max(most // 2, few)

    def steps_between(self, sequences: Sequence[EngineSequence], nodes: int, most: int) -> int:
        """Return how many steps a window may have where somebody waits for its end: for a prompt's turn, or its text.

        That is ``most``, or fewer where these would take more than twice as long as plain ones.
        """
        costs = self._seen(sequences).costs
        if nodes in costs and _PLAIN in costs:
            most = min(most, int(_LONGEST_BETWEEN * most * costs[_PLAIN] / costs[nodes]))
        elif nodes == self._ahead:
            most = min(most, _STEPS_AHEAD)
        return max(most, 1)

    def ran(self, sequences: Sequence[EngineSequence], nodes: int, steps: int, seconds: float | None) -> None:
        """Note what a window took, after what its sequences have `gained`; None where that tells nothing."""
        seen = self._seen(sequences)
        for width in self._widths:
            seen.ages[width] = 0 if width == nodes else seen.ages.get(width, 0) + steps
        if seconds is None:
            return
        is_trial = not self._is_known(seen, nodes)
        self._note_cost(seen, nodes, seconds / max(steps, 1), is_trial)
        seen.windows[nodes] = seen.windows.get(nodes, 0) + 1
        if nodes != _PLAIN and not is_trial and _PLAIN in seen.costs:
            pays = self._best_of(sequences, seen, list(seen.costs)) != _PLAIN
            seen.rest = _FIRST_REST if pays else min(2 * seen.rest, _LONGEST_REST)

    def gained(self, sequence: EngineSequence, nodes: int, tokens: int, steps: int) -> None:
        """Note how many tokens a sequence got from so many steps of ``nodes`` nodes."""
        if not steps:
            return
        found = _chance(tokens / steps, nodes)
        usual = self._usual.get(nodes, found)
        factor = found / max(usual, _LEAST_CHANCE)
        if nodes == self._ahead:
            sequence.gain_ahead = _moved(sequence.gain_ahead, factor, _share(sequence.steps_ahead, steps))
            sequence.steps_ahead += steps
        else:
            self._note_gain(sequence, factor, steps)
        self._note_usual(nodes, usual, found, steps)

    def drafted(self, sequence: EngineSequence, nodes: int, tokens: int, steps: int) -> None:
        """Note how many tokens the model that decodes ahead drafted in so many steps of its own, if it did."""
        if nodes == self._ahead and steps:
            # Beside what is usual for all numbers of nodes: those of its own may have run in a few windows only.
            found = _chance(tokens / steps, self._own_nodes)
            self._note_gain(sequence, found / max(self._usual_of_others(), _LEAST_CHANCE), steps)

    def tokens_per_step(self, sequence: EngineSequence, nodes: int) -> float:
        """Return how many tokens a step of so many nodes should give a sequence."""
        if nodes == _PLAIN:
            return 1.0
        gain = sequence.gain_ahead if nodes == self._ahead else sequence.gain
        return _tokens(gain * max(self._usual_of(nodes), _LEAST_CHANCE), nodes)

    def costs(self) -> dict[str, dict[str, float]]:
        """Return the seconds a step that have been measured, by powers of two of rows and by nodes."""
        return {
            str(power): {
                str(width): seen.costs[width] * (seen.common or 1.0)
                for width in self._widths
                if self._is_known(seen, width)
            }
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
                self._by_rows[power] = _Seen(each, common=None, windows=dict.fromkeys(each, _TRIALS), kept=set(each))
        return whole

    def _note_gain(self, sequence: EngineSequence, factor: float, steps: int) -> None:
        sequence.gain = _moved(sequence.gain, factor, _share(sequence.steps_drafted, steps))
        sequence.steps_drafted += steps

    def _note_cost(self, seen: _Seen, nodes: int, cost: float, is_trial: bool) -> None:
        """Note what a step of a window cost."""
        cost = max(cost, _LEAST_COST)
        if seen.common is None:
            # What an earlier process has not seen tells nothing of what it has.
            seen.common = cost / seen.costs.get(nodes, cost)
        if is_trial:
            seen.costs[nodes] = min(seen.costs.get(nodes, float("inf")), cost / seen.common)
        elif nodes in seen.kept:
            seen.costs[nodes] = cost / seen.common
        else:
            found = min(max(cost / (seen.costs[nodes] * seen.common), 1 / _FARTHEST), _FARTHEST)
            own = _NEWEST_OWN if nodes != seen.newest else 0.0
            seen.costs[nodes] *= found**own
            seen.common *= found ** ((1 - own) * _NEWEST_COMMON)
        seen.newest = nodes
        seen.kept.discard(nodes)

    def _note_usual(self, nodes: int, usual: float, found: float, steps: int) -> None:
        """Note the chance that so many steps have shown, of a usual one: a mean at first, then the newest's share."""
        before = self._usual_steps.get(nodes, 0)
        share = max(steps / (before + steps), 1 - (1 - _NEWEST_USUAL) ** steps)
        self._usual[nodes], self._usual_steps[nodes] = _moved(usual, found, share), before + steps

    def _usual_of(self, nodes: int) -> float:
        """Return the chance of a draft among so many nodes: if these have not run yet, what others have shown."""
        if nodes == self._ahead:
            return self._usual.get(nodes, _FIRST_CHANCE_AHEAD)
        return self._usual[nodes] if nodes in self._usual else self._usual_of_others()

    def _usual_of_others(self) -> float:
        """Return the chance of a draft in all steps but those of a model that decodes ahead."""
        steps = {width: count for width, count in self._usual_steps.items() if width != self._ahead}
        if not steps:
            return _FIRST_CHANCE
        return sum(self._usual[width] * count for width, count in steps.items()) / sum(steps.values())

    def _is_known(self, seen: _Seen, width: int) -> bool:
        return seen.windows.get(width, 0) >= _TRIALS

    def _best_of(self, sequences: Sequence[EngineSequence], seen: _Seen, widths: Sequence[int]) -> int:
        return max(widths, key=lambda width: self._rate(sequences, seen, width))

    def _rate(self, sequences: Sequence[EngineSequence], seen: _Seen, nodes: int) -> float:
        """Return tokens a second."""
        return sum(self.tokens_per_step(each, nodes) for each in sequences) / seen.costs[nodes]

    def _seen(self, sequences: Sequence[EngineSequence]) -> _Seen:
        return self._by_rows.setdefault((len(sequences) - 1).bit_length(), _Seen())


def _is_cost(seconds: float) -> bool:
    return 0 < seconds < float("inf")


def _tokens(chance: float, nodes: int) -> float:
    """Return how many tokens a chain of so many nodes gives, if each draft after a right one has this chance."""
    return (1 - chance**nodes) / (1 - chance) if chance < 1 else float(nodes)


def _chance(tokens: float, nodes: int) -> float:
    """Return the chance with which a chain of so many nodes gives so many tokens."""
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if _tokens(middle, nodes) < tokens else (least, middle)
    return least


def _hope(sequences: Sequence[EngineSequence], windows: int) -> float:
    """Return how many times more than it seems drafting may gain: less, the more steps and windows have been seen.

    What several sequences gain together differs less from what is usual.
    """
    unknown = (_STEPS_OF_USUAL / (_STEPS_OF_USUAL + each.steps_drafted + each.steps_ahead) for each in sequences)
    return 1 + _HOPE * (sum(unknown) / len(sequences) ** 1.5 + _TRIALS / windows)


def _share(before: int, steps: int) -> float:
    """Return how much so many new steps of a sequence count, after others before."""
    return max(steps / (_STEPS_OF_USUAL + before + steps), 1 - (1 - _NEWEST_GAIN) ** steps)


def _moved(before: float, newest: float, share: float) -> float:
    """Return a mean in which what is newest counts for a share."""
    return before + share * (newest - before)
