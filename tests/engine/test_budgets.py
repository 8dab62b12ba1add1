"""The scheduler's budgets of tokens, and what counts as cached."""

from jaxinfer.engine.sequence import Stage
from tests.engine.scheduled import Bench


def test_total_and_prefill_budgets():
    bench = Bench(pages=100, max_batch_total_tokens=50, max_rows=4)
    for _ in range(3):
        bench.add(8, new=16)
    while bench.step() is not None:
        scheduler = bench.scheduler
        assert sum(each.max_length for each in (*scheduler.prefilling, *scheduler.running)) <= 50
    bench = Bench(pages=100, max_batch_prefill_tokens=40, max_rows=4)
    for _ in range(3):
        bench.add(32, new=2)
    while bench.step() is not None:
        assert sum(each.to_fill - each.computed for each in bench.scheduler.prefilling) <= 40


def test_a_prompt_over_the_budget_waits_for_nobody_and_keeps_nobody_waiting():
    """It is computed beside those that decode; shorter ones come and go meanwhile, and another such one waits."""
    bench = Bench(pages=400, max_batch_prefill_tokens=40, max_rows=8)
    other = bench.add(8, new=400)
    for _ in range(4):
        bench.step()
    long, longer = bench.add(range(400, 560)), bench.add(range(2, 202))
    short = bench.add(range(300, 312), new=2)
    for _ in range(60):
        bench.step()
        prefilling = bench.scheduler.prefilling
        assert sum(each.left_to_fill > 40 for each in prefilling) <= 1
        assert sum(each.left_to_fill for each in prefilling if each.left_to_fill <= 40) <= 40
    assert other.stage is Stage.RUNNING
    assert long.stage is longer.stage is short.stage is Stage.ENDED
    assert bench.log.index(("chunk", short.number, 0, 12)) < bench.log.index(("chunk", long.number, 144, 16))


def test_what_is_cached_is_no_part_of_the_budget():
    bench = Bench(pages=100, max_batch_prefill_tokens=40, max_rows=4)
    first = bench.add(range(64), new=1)
    bench.run()
    filling = [bench.add(range(100, 138), new=2), bench.add([*range(32), 90], new=2)]
    bench.step()
    bench.step()
    assert filling[1].stage is not Stage.WAITING
    bench.run()
    assert (first.cached_tokens, filling[1].cached_tokens) == (0, 32)


def test_what_a_request_computes_again_was_not_cached():
    bench = Bench(pages=20, max_rows=2, preemption="recompute", aging_seconds=1e9)
    low = bench.add([1, 2, 3, 4], new=100)
    for _ in range(10):
        bench.step()
    bench.add([5] * 8, new=140, priority=1)
    bench.run()
    assert low.preemptions
    assert low.cached_tokens == 0
