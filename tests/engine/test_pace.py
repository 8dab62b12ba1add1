"""How many nodes windows verify follows what steps cost and what drafts give: simulated devices, no clock."""

import itertools
import random
from types import SimpleNamespace

import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.pace import Pace
from jaxinfer.engine.scheduler import Window
from jaxinfer.engine.sequence import EngineSequence

TWO, THREE = (1, 8), (1, 4, 8)


def sequences(count):
    return [EngineSequence(number, [1], 100, 0.0) for number in range(count)]


def simulate(rows, gains, costs, num_windows, pace=None, noise=0.0):
    """Run windows of 8 steps; return seconds, tokens, and the nodes of each.

    ``gains`` says what a row gets from a step of each number of nodes but one, in a window; ``costs`` what a step takes
    beside a plain one.
    """
    pace, now, draws = pace or Pace((1, *costs)), sequences(rows), random.Random(0)
    chosen, seconds, tokens = [], 0.0, 0.0
    for index in range(num_windows):
        nodes = pace.nodes(now)
        took = 8 * costs.get(nodes, 1.0) * (1 + noise * draws.random())
        gained = gains(index).get(nodes, 1.0)
        for each in now if nodes > 1 else ():
            pace.gained(each, nodes, round(8 * gained), 8)
        pace.ran(now, nodes, 8, took)
        chosen.append(nodes)
        seconds, tokens = seconds + took, tokens + rows * 8 * gained
    return seconds, tokens, chosen


@pytest.mark.parametrize(("costs", "gains"), [({8: 2.5}, {8: 1.25}), ({4: 1.8, 8: 2.5}, {4: 1.125, 8: 1.25})])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_where_drafts_lose_windows_go_at_plain_speed(rows, costs, gains):
    """A step costs 2.5 times as much and gives 1.25 tokens: over a thousand windows, 3% are lost at the most."""
    seconds, tokens, chosen = simulate(rows, lambda index: gains, costs, 1000, noise=0.2)
    plain, plain_tokens, _ = simulate(rows, lambda index: {}, {}, 1000, noise=0.2)
    assert tokens / seconds >= 0.97 * plain_tokens / plain
    # It is tried again now and then, ever less often.
    later = [index for index, nodes in enumerate(chosen) if nodes > 1][2 * len(costs) + 1 :]
    assert later
    gaps = [after - before for before, after in itertools.pairwise(later)]
    assert max(gaps) > 3 * min(gaps)


def test_where_drafts_win_they_stay():
    _, _, chosen = simulate(4, lambda index: {8: 2.25}, {8: 1.5}, 1000, noise=0.2)
    assert chosen.count(8) >= 0.98 * len(chosen)
    # What plain steps cost is seen again.
    assert 1 in chosen[10:]


def test_as_many_nodes_are_verified_as_pay_best():
    """Four give 1.75 tokens for 1.25 steps, eight 2.25 for 2: for more rows, whose nodes cost more, none do."""
    gains = {4: 1.75, 8: 2.25}
    for costs, best in (({4: 1.05, 8: 1.1}, 8), ({4: 1.25, 8: 2.0}, 4), ({4: 1.9, 8: 3.2}, 1)):
        _, _, chosen = simulate(2, lambda index: gains, costs, 1000, noise=0.1)
        assert chosen.count(best) >= 0.95 * len(chosen)


@pytest.mark.parametrize(("busy", "best"), [(1.5, 1), (0.6, 4)])
def test_what_makes_all_steps_dearer_changes_no_choice(busy, best):
    """A longer text, or other work on the machine, while one number of nodes ran: the others cost as much more now."""
    pace, (one,), costs = Pace((1, 4)), sequences(1), {1: busy, 4: 1.6 * busy}
    gain = 1.5 if best == 1 else 1.7
    _, _, before = simulate(1, lambda index: {4: gain}, {4: 1.6}, 60, pace)
    assert before[-1] == best
    chosen = []
    for _ in range(24):
        chosen.append(pace.nodes([one]))
        if chosen[-1] == 4:
            pace.gained(one, 4, round(8 * gain), 8)
        pace.ran([one], chosen[-1], 8, 8 * costs[chosen[-1]])
    assert chosen.count(best) >= 22
    assert pace.costs()["0"]["4"] / pace.costs()["0"]["1"] == pytest.approx(1.6, rel=0.1)


@pytest.mark.parametrize(("gain", "then"), [(1.5, 1), (3.0, 4)])
def test_a_new_text_is_tried_where_drafts_hardly_lose(gain, then):
    """Most texts gain less than a step costs, by a tenth; the next one gains as little, or twice as much."""
    pace, costs = Pace((1, 4)), {4: 1.65}
    for _ in range(20):
        simulate(1, lambda index: {4: 1.5}, costs, 6, pace)
    _, _, chosen = simulate(1, lambda index: {4: gain}, costs, 6, pace)
    assert chosen[0] == 4
    assert chosen[2:] == [then] * 4
    # Where they lose by far, no text is.
    pace = Pace((1, 4))
    for _ in range(20):
        _, _, chosen = simulate(1, lambda index: {4: 1.25}, {4: 2.0}, 6, pace)
    assert chosen == [1] * 6


def test_half_of_what_eight_steps_gain_is_believed():
    pace, (one, other) = Pace((1, 4)), sequences(2)
    simulate(1, lambda index: {4: 1.75}, {4: 1.2}, 40, pace)
    pace.gained(one, 4, 26, 8)
    assert one.gain == pytest.approx((1 + 0.904 / 0.474) / 2, rel=0.05)
    for _ in range(10):
        pace.gained(one, 4, 8, 8)
    assert one.gain < 0.2
    pace.drafted(other, 4, 0, 0)
    assert other.gain == 1.0


def test_looks_are_rare_where_the_choice_is_known():
    """Plain steps show nothing of drafts; these are looked at twice as often, and what is tried after few steps."""
    for gain, steps in ((1.2, 32), (1.9, 16)):
        pace, (one,) = Pace((1, 4)), sequences(1)
        assert pace.steps([one], 1, 32) == 8
        simulate(1, lambda index, gain=gain: {4: gain}, {4: 1.6}, 20, pace)
        best = 1 if steps == 32 else 4
        assert pace.steps([one], best, 32) == steps
        assert pace.steps([one], 5 - best, 32) == 8
        assert pace.steps([one], best, 3) == 3


def test_a_cost_that_few_windows_have_shown_is_doubted():
    """Other work made the first two windows of four nodes look a third dearer than they are."""
    pace = Pace((1, 4))
    simulate(1, lambda index: {4: 1.8}, {4: 2.2}, 4, pace)
    _, _, chosen = simulate(1, lambda index: {4: 1.8}, {4: 1.6}, 12, pace)
    assert chosen[0] == 4
    assert chosen[-6:].count(4) >= 5


def test_what_few_nodes_give_tells_what_many_would():
    """A text that takes no drafts of four nodes is not tried with eight; one that takes many is."""
    pace, (good, bad) = Pace(THREE), sequences(2)
    simulate(2, lambda index: {4: 1.75, 8: 2.5}, {4: 1.25, 8: 1.6}, 11, pace)
    for _ in range(40):
        pace.gained(good, 4, 24, 8)
        pace.gained(bad, 4, 8, 8)
    assert pace.tokens_per_step(good, 8) > 1.8 * pace.tokens_per_step(bad, 8)
    assert pace.tokens_per_step(bad, 8) == pytest.approx(1.0, abs=0.05)
    assert pace.nodes([good, good]) == 8
    assert pace.nodes([bad, bad]) == 1


def test_a_text_that_takes_nearly_all_of_few_nodes_gets_many():
    """Of four nodes it takes 3.25 tokens, so of eight more than twice what is usual for these; and five in truth."""
    pace = Pace(THREE)
    simulate(1, lambda index: {4: 1.75, 8: 2.0}, {4: 1.2, 8: 1.5}, 40, pace)
    assert pace.nodes(sequences(1)) == 4
    _, _, chosen = simulate(1, lambda index: {4: 3.25, 8: 5.0}, {4: 1.2, 8: 1.5}, 20, pace)
    assert chosen[-12:] == [8] * 12


def test_costs_of_a_busy_time_are_soon_corrected():
    """An earlier process shared the machine while it measured eight nodes, which are the best."""
    pace = Pace(THREE)
    assert pace.begin_with({"0": {"1": 1.0, "4": 1.1, "8": 3.0}})
    _, _, chosen = simulate(1, lambda index: {4: 2.0, 8: 2.8}, {4: 1.1, 8: 1.2}, 40, pace)
    assert chosen[:4] == [4] * 4
    assert chosen[16:].count(8) >= 22


def test_what_an_earlier_process_has_not_seen_is_tried():
    """It knew plain steps alone, or all but these; the first window of this process is of another number of nodes."""
    for kept in ({"1": 2.0}, {"4": 2.4, "8": 2.8}):
        pace = Pace(THREE)
        assert pace.begin_with({"0": kept})
        _, _, chosen = simulate(1, lambda index: {4: 2.0, 8: 2.6}, {4: 1.2, 8: 1.4}, 30, pace)
        assert str(chosen[0]) not in kept
        assert chosen[-8:].count(8) >= 7
        costs = pace.costs()["0"]
        assert costs["8"] / costs["1"] == pytest.approx(1.4, rel=0.05)


def test_a_clock_that_stands_still_is_survived():
    pace = Pace(THREE)
    simulate(1, lambda index: {4: 2.0, 8: 2.6}, {4: 0.0, 8: 0.0}, 12, pace)
    assert pace.nodes(sequences(1)) > 1


def test_a_window_that_tells_nothing_is_no_cost():
    pace, now = Pace(TWO), sequences(1)
    simulate(1, lambda index: {8: 2.0}, {8: 1.5}, 6, pace)
    known = pace.costs()
    pace.ran(now, 8, 8, None)
    assert pace.costs() == known


def test_what_is_not_ready_waits():
    pace, now = Pace(THREE), sequences(1)
    assert pace.nodes(now, [8]) == 8
    simulate(1, lambda index: {8: 2.0}, {4: 1.0, 8: 1.0}, 2, pace)
    assert pace.nodes(now, [8]) == 8
    assert pace.nodes(now, [1, 8]) == 1
    assert pace.nodes(now, [1, 4, 8]) == 4


def test_drafting_begins_again_when_the_text_changes():
    _, _, chosen = simulate(2, lambda index: {8: 1.0 if index < 200 else 3.0}, {8: 1.5}, 600)
    assert chosen[20:200].count(8) < 20
    assert chosen[-200:].count(8) > 190


def test_each_number_of_rows_has_its_own_costs():
    """Alone drafts pay, eight at once they do not; rows are counted as programs are."""
    pace = Pace(TWO)
    for _ in range(12):
        simulate(1, lambda index: {8: 2.0}, {8: 1.2}, 10, pace)
        simulate(8, lambda index: {8: 2.0}, {8: 2.6}, 10, pace)
    assert pace.nodes(sequences(1)) == 8
    assert pace.nodes(sequences(8)) == 1
    assert pace.nodes(sequences(5)) == 1


def test_rows_that_gain_decide_with_those_that_do_not():
    """A row that gains much pays for one that gains nothing, as long as both are together worth it."""
    pace, (good, bad) = Pace(TWO), sequences(2)
    simulate(2, lambda index: {8: 2.0}, {8: 2.0}, 6, pace)
    for _ in range(40):
        pace.gained(good, 8, 32, 8)
        pace.gained(bad, 8, 8, 8)
    assert pace.tokens_per_step(good, 8) == pytest.approx(4.0, rel=0.03)
    assert pace.tokens_per_step(bad, 8) == pytest.approx(1.0, rel=0.03)
    assert pace.nodes([good, bad]) == 8
    assert pace.nodes([bad, bad]) == 1


AHEAD = 13, 3


def ahead_pace(costs):
    """A pace that knows what steps cost: 13 nodes are a model's that decodes ahead in steps of 3."""
    pace = Pace((1, 4, 8, 13), AHEAD)
    assert pace.begin_with({"0": costs})
    return pace


def test_a_model_that_decodes_ahead_is_believed_to_draft_well_before_it_has():
    pace = ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 3.0})
    assert pace.nodes(sequences(1)) == 13
    assert ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 8.0}).nodes(sequences(1)) != 13


def test_what_it_drafts_says_nothing_of_other_drafters():
    pace, (one,) = ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 3.0}), sequences(1)
    pace.gained(one, 8, 16, 8)
    before = pace.tokens_per_step(one, 8)
    pace.gained(one, 13, 100, 8)
    assert pace.tokens_per_step(one, 8) == before == pytest.approx(2.0, rel=0.01)
    assert pace.tokens_per_step(one, 13) == pytest.approx(12.5, rel=0.01)
    for _ in range(100):
        pace.gained(one, 13, 8, 8)
    assert pace.tokens_per_step(one, 13) < 3.0
    assert pace.tokens_per_step(one, 8) == before


def test_its_own_steps_say_how_well_the_others_would_draft():
    """A text that repeats itself: every draft that the model gets is taken, so eight nodes would give all of them."""
    pace, (one,) = ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 3.0}), sequences(1)
    for _ in range(3):
        pace.gained(one, 8, 16, 8)
        pace.gained(one, 13, 88, 8)
        pace.drafted(one, 13, 80, 46)
    assert pace.nodes([one]) == 13
    for _ in range(3):
        pace.gained(one, 13, 104, 8)
        pace.drafted(one, 13, 96, 32)
    assert pace.nodes([one]) == 8
    # Of any other number of nodes there is no model, and nothing to note.
    known = pace.tokens_per_step(one, 8)
    pace.drafted(one, 8, 0, 0)
    assert pace.tokens_per_step(one, 8) == known


def test_few_windows_of_its_own_number_of_nodes_are_no_measure_of_its_steps():
    """Three nodes ran once, on a text that took none; the model's own steps of three go as those of eight do."""
    pace, (one, other) = ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 3.0}), sequences(2)
    pace.gained(one, 3, 8, 8)
    for _ in range(20):
        pace.gained(one, 8, 16, 8)
    pace.drafted(other, 13, 70, 40)
    assert other.gain == pytest.approx(1.0, rel=0.1)


def test_the_first_window_is_one_of_many():
    pace, (one, other) = Pace(TWO), sequences(2)
    pace.gained(one, 8, 8, 8)
    for _ in range(20):
        pace.gained(one, 8, 16, 8)
    assert pace.tokens_per_step(other, 8) == pytest.approx(1.9, rel=0.02)


def test_a_window_that_somebody_waits_for_is_about_as_long_as_a_plain_one():
    pace, now = ahead_pace({"1": 1.0, "4": 1.2, "8": 1.4, "13": 8.0}), sequences(1)
    assert [pace.steps_between(now, nodes, 8) for nodes in (1, 4, 8, 13)] == [8, 8, 8, 2]
    assert [pace.steps_between(now, nodes, 2) for nodes in (1, 4, 8, 13)] == [2, 2, 2, 1]
    # Before anything is known, only of the model that decodes ahead that its steps are long.
    assert [Pace((1, 8, 13), AHEAD).steps_between(now, nodes, 8) for nodes in (1, 8, 13)] == [8, 8, 2]


@pytest.mark.parametrize(
    ("others_come", "serves_calls", "nodes"), [(True, False, 8), (True, True, 13), (False, False, 13)]
)
def test_nobody_decodes_ahead_while_prompts_wait_for_their_first_token(others_come, serves_calls, nodes):
    (one,) = sequences(1)
    core = SimpleNamespace(
        _pace=ahead_pace({"1": 1.0, "4": 1.2, "8": 1.25, "13": 3.0}),
        _device=SimpleNamespace(ready_nodes=lambda rows, pages: [1, 4, 8, 13]),
        scheduler=SimpleNamespace(others_come=others_come),
        serves_calls=serves_calls,
    )
    core._pace.gained(one, 8, 24, 8)
    assert EngineCore._nodes(core, Window((one,), 8)) == nodes


@pytest.mark.parametrize(("cost", "soon"), [(1.7, True), (2.6, False)])
def test_what_is_nearly_the_best_is_measured_anew_soon(cost, soon):
    """Other work made eight nodes look dearer than four once; nobody looks soon at what is far from the best."""
    pace = Pace(THREE)
    simulate(1, lambda index: {4: 2.0, 8: 2.6}, {4: 1.2, 8: cost}, 12, pace)
    _, _, chosen = simulate(1, lambda index: {4: 2.0, 8: 2.6}, {4: 1.2, 8: 1.2}, 48, pace)
    assert chosen[:8] == [4] * 8
    assert (chosen[-8:] == [8] * 8) == soon
