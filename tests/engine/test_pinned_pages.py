"""The scheduler with pages that are pinned by name until they are let go."""

from tests.engine.scheduled import Bench, chunks_of


def test_pinned_pages_stay_until_they_are_let_go():
    bench = Bench(pages=8)
    text = list(range(16))
    bench.add(text, new=1)
    bench.run()
    bench.scheduler.held.pin("system", bench.index.keys(text, ""))
    for start in range(100, 400, 20):
        bench.add(range(start, start + 20))
        bench.run()
    assert bench.scheduler.held.most_pages() == 6
    last = bench.add([*text, 1, 2])
    bench.run()
    assert chunks_of(bench, last.number) == [(16, 2)]
    bench.scheduler.held.unpin("system")
    assert bench.pool.in_use == 0
    bench.scheduler.check()


def pin(bench, text, name="system"):
    bench.add(text, new=1)
    bench.run()
    bench.scheduler.held.pin(name, bench.index.keys(text, ""))


def test_pinned_pages_count_for_those_that_begin_with_them():
    """Six of eight pages are pinned: two are left for a text of eight pages that begins with them, and it is served."""
    bench = Bench(pages=8)
    text = list(range(48))
    pin(bench, text)
    pin(bench, text, "the same again")
    sequence = bench.add([*text, 1, 2], new=12)
    other = bench.add([9, *text, 2], new=12)
    assert bench.scheduler.held.most_pages() == 2
    assert bench.scheduler.held.own_pages(sequence, "") == 2
    assert bench.scheduler.held.fits(sequence, "")
    assert not bench.scheduler.held.fits(other, "")
    assert not bench.scheduler.held.fits(sequence, "another tenant")
    bench.scheduler.end(other)
    bench.run()
    assert len(sequence.tokens) == sequence.max_length
    bench.scheduler.held.unpin("system")
    assert bench.scheduler.held.most_pages() == 2
    bench.scheduler.held.unpin("the same again")
    assert bench.scheduler.held.most_pages() == 8


def test_one_that_made_room_comes_back_on_pinned_pages():
    """What was saved is for pages of its own, of which there are too few: it is computed again instead."""
    bench = Bench(pages=10, max_rows=2, aging_seconds=1e9)
    text = list(range(48))
    pin(bench, text)
    low = bench.add([*text, 1, 2], new=20)
    for _ in range(3):
        bench.step()
    high = bench.add([5] * 4, new=20, priority=1)
    bench.run()
    assert low.preemptions >= 1
    assert ("restore", low.number) not in bench.log
    assert all(len(each.tokens) == each.max_length for each in (low, high))
