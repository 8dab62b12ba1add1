"""The scheduler's policy, from lists of events: nothing runs, and time is what the test says."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.scheduler import Chunk, Window
from jaxinfer.engine.sequence import Stage
from tests.engine.scheduled import Bench, chunks_of


def test_windows_are_short_while_a_prompt_is_computed():
    """Its row is idle until then, and those that run lose little."""
    bench, steps = Bench(steps_per_look=8, waiting_served_ratio=0.1), []
    bench.add(4, new=60)
    for _ in range(3):
        bench.step()
    bench.add(40, new=60)
    for _ in range(10):
        action = bench.step()
        if isinstance(action, Window):
            steps.append((len(action.sequences), action.steps))
    assert steps[:2] == [(1, 2)] * 2
    assert set(steps[2:]) == {(2, 8)}


def test_windows_are_short_while_somebody_waits_for_a_free_row():
    """A prompt of one chunk is followed by a short window, as long as another prompt can come."""
    bench = Bench(steps_per_look=8, max_rows=3)
    for _ in range(4):
        bench.add(4, new=60)
    kinds = [bench.step() for _ in range(8)]
    steps = [(len(each.sequences), each.steps) for each in kinds if isinstance(each, Window)]
    # The third takes the last row: the fourth waits for a row, and short windows would bring it none.
    assert steps[:4] == [(1, 2), (2, 2), (3, 8), (3, 8)]


def test_a_free_row_is_given_after_the_next_step():
    bench = Bench(max_rows=8, steps_per_look=8, pages=400)
    for _ in range(7):
        bench.add(4, new=1000)
    for _ in range(20):
        bench.step()
    bench.add(4)
    kinds = [type(bench.step()) for _ in range(2)]
    assert Chunk in kinds


def test_a_prompt_is_computed_in_chunks_between_which_others_decode():
    bench = Bench()
    bench.add(4, new=12)
    bench.step()
    bench.add(range(40))
    kinds = [type(bench.step()).__name__ for _ in range(6)]
    assert kinds == ["Window", "Chunk", "Window", "Chunk", "Window", "Chunk"]
    assert chunks_of(bench, 1) == [(0, 16), (16, 16), (32, 8)]


def test_chunks_end_on_an_absolute_grid_after_a_shared_prefix_too():
    bench = Bench()
    text = list(range(100, 140))
    bench.add(text)
    bench.run()
    bench.add([*text[:24], *range(30)])
    bench.run()
    # 24 tokens are three pages that the first request has left.
    assert chunks_of(bench, 1) == [(24, 8), (32, 16), (48, 6)]


def test_samples_wait_for_the_first_one_and_copy_its_last_page():
    """A prompt of two pages and a half: the others compute its last token alone."""
    bench = Bench()
    text = list(range(22))
    first = bench.add(text, new=30)
    others = [bench.add(text, new=30, leader=first) for _ in range(2)]
    while not all(each.stage is Stage.RUNNING for each in (first, *others)):
        bench.step()
    assert [chunks_of(bench, number) for number in range(3)] == [[(0, 16), (16, 6)], [(21, 1)], [(21, 1)]]
    assert bench.copied == [(first.pages[2], each.pages[2]) for each in others]
    assert others[0].cached_tokens == 21
    assert len({each.pages[2] for each in (first, *others)}) == 3


def test_a_page_is_copied_as_far_as_prompts_agree_while_it_lasts():
    bench = Bench(shares_answers=False)
    text = list(range(22))
    bench.add(text, new=30)
    for _ in range(3):
        bench.step()
    bench.add([*text[:21], 99, 98], new=1)
    bench.add([*text[:18], *range(50, 60)], new=1)
    bench.add([*text[:21], 97], new=1, salt="another tenant")
    bench.run()
    # Five tokens of the third page are the same, then two, which are not worth a copy.
    assert [chunks_of(bench, number)[0] for number in (1, 2, 3)] == [(21, 2), (16, 12), (0, 16)]
    # Its owner has ended, and its answer is nobody's.
    bench.add([*text[:21], 96], new=1)
    bench.run()
    assert chunks_of(bench, 4) == [(16, 6)]


def test_a_pinned_prefix_keeps_its_last_page_too():
    bench = Bench(pages=12)
    text = list(range(22))
    sequence = bench.add(text, new=1)
    while sequence.computed < 22:
        action = bench.scheduler.next(bench.now)
        bench.scheduler.computed(action)
    bench.scheduler.held.pin("system", sequence.keys, bench.scheduler.held.tail_of(sequence))
    bench.scheduler.end(sequence)
    for start in range(100, 400, 20):
        bench.add(range(start, start + 20))
        bench.run()
    last = bench.add([*text, 1, 2], new=1)
    bench.run()
    assert chunks_of(bench, last.number) == [(22, 2)]
    bench.scheduler.held.unpin("system")
    assert bench.pool.in_use == 0
    again = bench.add([*text, 1, 2], new=1)
    bench.run()
    assert chunks_of(bench, again.number)[0] == (16, 8)


def test_the_last_token_of_a_prompt_is_always_computed():
    bench = Bench()
    for _ in range(2):
        bench.add(range(16))
        bench.run()
    assert chunks_of(bench, 1) == [(8, 8)]


def test_pages_of_answers_are_shared_only_where_they_may_be():
    text = list(range(16))
    for shares, expected in ((True, [(24, 1)]), (False, [(16, 9)])):
        bench = Bench(shares_answers=shares)
        first = bench.add(text, new=9)
        bench.run()
        bench.add([*first.tokens[:25]])
        bench.run()
        assert chunks_of(bench, 1) == expected


def test_without_a_prefix_cache_everything_is_computed():
    bench = Bench(prefix_cache="off")
    for _ in range(2):
        bench.add(range(16))
        bench.run()
    assert chunks_of(bench, 1) == [(0, 16)]
    assert bench.pool.cached == 0


@pytest.mark.parametrize(("ratio", "waiting"), [(2.0, 4), (1.0, 2), (0.5, 1), (0.3, 1)])
def test_as_many_wait_before_decoding_pauses_as_the_ratio_says(ratio, waiting):
    """With two that run, 2.0 lets four wait before a prompt interrupts them, 1.0 two."""
    bench = Bench(max_waiting_tokens=10**6, max_rows=16, pages=400)
    for _ in range(2):
        bench.add(4, new=1000)
    for _ in range(3):
        bench.step()
    assert len(bench.scheduler.running) == 2
    bench.scheduler.config = replace(bench.config, waiting_served_ratio=ratio)
    for count in range(1, waiting + 1):
        bench.add(4)
        kinds = {type(bench.step()) for _ in range(4)}
        assert (Chunk in kinds) == (count >= waiting)


def test_who_waits_long_enough_interrupts_whatever_the_ratio():
    bench = Bench(waiting_served_ratio=100.0, max_waiting_tokens=10)
    bench.add(4, new=1000)
    bench.step()
    bench.add(4)
    kinds = [type(bench.step()).__name__ for _ in range(8)]
    # The first window is short, since a row is free: nine steps in five.
    assert kinds == ["Window"] * 6 + ["Chunk", "Window"]


def test_those_that_draft_take_turns_with_those_that_do_not():
    bench = Bench()
    for drafts in (True, False, True):
        bench.add(4, new=40, drafts=drafts)
    for _ in range(12):
        bench.step()
    windows = [entry[1:] for entry in bench.log if entry[0] == "window"]
    assert windows[-4:] in ([(0, 2), (1,)] * 2, [(1,), (0, 2)] * 2)


def test_first_come_first_served_and_priorities_before():
    bench = Bench(max_rows=1, aging_seconds=1e9)
    for priority in (0, 0, 5, 1):
        bench.add(4, priority=priority)
    bench.run()
    assert [entry[1] for entry in bench.log if entry[0] == "chunk"] == [2, 3, 0, 1]


def test_waiting_adds_to_a_priority():
    bench = Bench(max_rows=1, aging_seconds=5.0)
    low = bench.add(4)
    bench.now = 20.0
    bench.add(4, priority=3)
    bench.step()
    assert low.stage is Stage.RUNNING or low.stage is Stage.ENDED


def test_a_short_prompt_overtakes_a_long_one_but_not_for_ever():
    bench = Bench(pages=200, max_rows=16)
    bench.add(160, new=1)
    for _ in range(12):
        bench.add(14, new=1)
    bench.run()
    order = [entry[1] for entry in bench.log if entry[0] == "chunk"]
    assert order.index(1) < max(at for at, number in enumerate(order) if number == 0)
    gaps = [at for at, number in enumerate(order) if number == 0]
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 6


def test_one_that_does_not_fit_is_passed_by_few():
    bench = Bench(pages=12, max_rows=3)
    bench.add(40, new=40)
    bench.step()
    big = bench.add(60, new=4)
    for _ in range(60):
        bench.add(4, new=4)
    bench.run()
    started = [entry[1] for entry in bench.log if entry[0] == "chunk"]
    assert started.index(big.number) <= 30


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_where_pages_run_out_the_last_makes_room_and_comes_back(preemption):
    bench = Bench(pages=8, max_rows=2, preemption=preemption)
    first, second = bench.add(8, new=40), bench.add(8, new=40)
    bench.run()
    assert first.preemptions == 0 < second.preemptions == bench.scheduler.preemptions
    assert [len(each.tokens) for each in (first, second)] == [48, 48]
    came_back = [entry for entry in bench.log if entry[0] == "restore"]
    assert bool(came_back) == (preemption == "offload")
    if preemption == "recompute":
        # All of the text is computed again but its last token, which is known.
        start, count = chunks_of(bench, 1)[-1]
        assert start + count == second.prompt_length + (start + count - second.prompt_length)


def test_a_higher_priority_takes_the_pages_of_a_lower_one_that_came_first():
    bench = Bench(pages=8, max_rows=2, aging_seconds=1e9)
    low = bench.add(8, new=40)
    bench.step()
    high = bench.add(8, new=40, priority=1)
    bench.run()
    assert low.preemptions >= 1
    assert high.preemptions == 0


def test_those_that_are_cancelled_or_late_are_named_wherever_they_are():
    bench = Bench(max_rows=1)
    running, waiting = bench.add(4, new=50), bench.add(4, deadline=30.0)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.expired(29.0) == []
    assert bench.scheduler.expired(30.0) == [waiting]
    running.is_cancelled = True
    assert set(bench.scheduler.expired(30.0)) == {running, waiting}
    for sequence in (running, waiting):
        bench.scheduler.end(sequence)
    assert bench.scheduler.is_idle
    assert bench.pool.in_use == 0
    bench.scheduler.check()


def test_nobody_comes_back_for_no_more_than_to_make_room_again():
    """One that returns has the pages of a window, which takes three here; with one it would give way at once."""
    bench = Bench(pages=20, tokens_per_step=9, headroom=9)
    sequences = [bench.add(8, new=100) for _ in range(4)]
    bench.run()
    assert all(len(each.tokens) == each.max_length for each in sequences)
    kinds = [entry[0] for entry in bench.log if entry[0] != "chunk"]
    returns = [at for at, kind in enumerate(kinds) if kind == "restore"]
    assert returns
    assert not any(kinds[at + 1 : at + 2] == ["preempt"] for at in returns)


def test_a_long_queue_is_not_looked_through_again_and_again():
    bench = Bench(pages=12, max_rows=3)
    bench.add(40, new=40)
    bench.step()
    for _ in range(200):
        bench.add(60, new=4)
    looked, find = [], bench.index.find
    bench.index.find = lambda keys: looked.append(1) or find(keys)
    bench.step()
    bench.step()
    assert 0 < len(looked) <= 40


def test_when_the_device_loses_all_everything_begins_anew():
    bench = Bench()
    sequences = [bench.add(range(20), new=20) for _ in range(2)]
    for _ in range(5):
        bench.step()
    bench.scheduler.lose_all()
    bench.scheduler.check()
    assert bench.pool.in_use == bench.pool.cached == 0
    bench.log.clear()
    bench.run()
    assert chunks_of(bench, 0)[0][0] == 0
    assert all(len(each.tokens) == 40 for each in sequences)


arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(arrivals, st.sampled_from(["offload", "recompute"]), st.integers(11, 24), st.integers(1, 3))
def test_all_that_arrive_end_and_nothing_is_lost(events, preemption, pages, per_step):
    """Prompts and answers of any length, priorities and cancellations, on few pages."""
    bench = Bench(
        pages=pages, tokens_per_step=per_step, headroom=per_step, preemption=preemption, max_rows=3, aging_seconds=20.0
    )
    pending = sorted(events, key=lambda event: event[0])
    sequences, cancelled = [], []
    for _ in range(4000):
        while pending and pending[0][0] <= bench.now:
            _, prompt, new, priority, is_cancelled = pending.pop(0)
            sequences.append(bench.add([prompt % 3] * prompt, new=new, priority=priority))
            if is_cancelled:
                cancelled.append(sequences[-1])
        if cancelled and bench.now % 7 == 0:
            bench.scheduler.end(cancelled.pop())
        if bench.step() is None and not pending:
            break
    assert not pending
    assert bench.scheduler.is_idle
    assert bench.pool.in_use == 0
    assert all(each.stage is Stage.ENDED for each in sequences)
    assert sum(len(each.tokens) == each.max_length for each in sequences) >= len(sequences) - sum(
        event[4] for event in events
    )
