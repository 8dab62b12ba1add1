"""Whether windows draft follows what steps cost and what drafts give: simulated devices, no clock."""

import itertools
import random

import pytest

from jaxinfer.engine.pace import Pace
from jaxinfer.engine.sequence import EngineSequence


def sequences(count):
    return [EngineSequence(number, [1], 100, 0.0) for number in range(count)]


def simulate(rows, gain, cost, num_windows, pace=None, noise=0.0):
    """Run windows of 8 steps; ``gain`` says what a row gets from a step with drafts. Return seconds, tokens, kinds."""
    pace, now, kinds, seconds, tokens, draws = pace or Pace(), sequences(rows), [], 0.0, 0.0, random.Random(0)
    for index in range(num_windows):
        drafts = pace.drafts(now)
        took = 8 * (cost if drafts else 1.0) * (1 + noise * draws.random())
        gained = gain(index) if drafts else 1.0
        for each in now if drafts else ():
            pace.gained(each, round(8 * gained), 8)
        pace.ran(now, drafts, 8, took)
        kinds.append(drafts)
        seconds, tokens = seconds + took, tokens + rows * 8 * gained
    return seconds, tokens, kinds


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_where_drafts_lose_windows_go_at_plain_speed(rows):
    """A step costs 2.5 times as much and gives 1.25 tokens: over a thousand windows, 3% are lost at the most."""
    seconds, tokens, kinds = simulate(rows, lambda index: 1.25, 2.5, 1000, noise=0.2)
    plain, plain_tokens, _ = simulate(rows, lambda index: 1.0, 1.0, 1000, noise=0.2)
    assert tokens / seconds >= 0.97 * plain_tokens / plain
    # It is tried again now and then, ever less often.
    later = [index for index, drafts in enumerate(kinds) if drafts][3:]
    assert later
    gaps = [after - before for before, after in itertools.pairwise(later)]
    assert max(gaps) > 3 * min(gaps)


def test_where_drafts_win_they_stay():
    _, _, kinds = simulate(4, lambda index: 2.25, 1.5, 1000, noise=0.2)
    assert sum(kinds) >= 0.98 * len(kinds)
    # What plain steps cost is seen again.
    assert not all(kinds[10:])


def test_drafting_begins_again_when_the_text_changes():
    _, _, kinds = simulate(2, lambda index: 1.0 if index < 200 else 3.0, 1.5, 600)
    assert sum(kinds[20:200]) < 20
    assert sum(kinds[-200:]) > 190


def test_each_number_of_rows_has_its_own_costs():
    """Alone drafts pay, eight at once they do not; rows are counted as programs are."""
    pace = Pace()
    for _ in range(12):
        simulate(1, lambda index: 2.0, 1.2, 10, pace)
        simulate(8, lambda index: 2.0, 2.6, 10, pace)
    assert pace.drafts(sequences(1))
    assert not pace.drafts(sequences(8))
    assert not pace.drafts(sequences(5))


def test_rows_that_gain_decide_with_those_that_do_not():
    """A row that gains much pays for one that gains nothing, as long as both are together worth it."""
    pace, (good, bad) = Pace(), sequences(2)
    simulate(2, lambda index: 2.0, 2.0, 6, pace)
    for _ in range(40):
        pace.gained(good, 32, 8)
        pace.gained(bad, 8, 8)
    assert good.gain == pytest.approx(4.0, rel=0.02)
    assert bad.gain == pytest.approx(1.0, rel=0.02)
    assert pace.drafts([good, bad])
    assert not pace.drafts([bad, bad])
