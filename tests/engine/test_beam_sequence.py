"""The scheduler's side of beam searches: rows come and go together, and share the pages of what they have in common."""

import itertools

import pytest

from jaxinfer.engine.beam_sequence import BeamSequence
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.held_pages import HeldPages
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex
from jaxinfer.engine.scheduler import Chunk, Restore, Scheduler, Window
from jaxinfer.engine.sequence import Stage

PAGE, WIDTH = 8, 3


class Bench:
    """A scheduler for two searches of three rows, whose device computes nothing."""

    def __init__(self, pages=60, **options):
        config = EngineConfig(max_rows=7, page_size=PAGE, prefill_chunk=16, steps_per_look=4, **options)
        self.pool, self.numbers, self.now = PagePool(pages + 1), itertools.count(), 0.0
        rule = {"headroom": 1, "shares_answers": True, "rows_each": WIDTH}
        held = HeldPages(config, self.pool, PrefixIndex(self.pool, PAGE), **rule)
        self.scheduler = Scheduler(config, held, tokens_per_step=1)
        self.scheduler.preempt = self.preempt

    def add(self, length, new=30):
        number = next(self.numbers)
        prompt = [number] * length
        search = BeamSequence(number, prompt, length + new, self.now, width=WIDTH)
        self.scheduler.add(search)
        return search

    def act(self):
        """Take the next action, and do what a core does after chunks and restorations."""
        action = self.scheduler.next(self.now)
        self.now += 1.0
        if isinstance(action, Chunk) and self.scheduler.computed(action):
            if action.sequence.kept is not None:
                action.sequence.went_on()
            else:
                # Entering draws a token.
                self.grow(action.sequence, 1)
        if isinstance(action, Restore):
            action.sequence.went_on()
            self.scheduler.restored(action.sequence)
        self.scheduler.check()
        return action

    def run_until(self, search):
        while search.stage is not Stage.RUNNING:
            self.act()

    def grow(self, search, count, parents=(0, 1, 2)):
        """Draw tokens for the rows, then let each go on from its parent: full pages change hands."""
        search.tokens = search.tokens + [100] * count
        full = (len(search.tokens) - 1) // PAGE
        before = search.tables
        tables = [before[parent][:full] + before[row][full:] for row, parent in enumerate(parents)]
        self.scheduler.held.forked(search, tables)
        self.scheduler.check()

    def preempt(self, search):
        if search.stage is Stage.RUNNING:
            texts = [[*search.tokens[:-1], row] for row in range(WIDTH)]
            search.leave("row", texts, self.scheduler.held.pages_for(len(search.tokens)))
            search.saved = "pages" if self.scheduler.config.preemption == "offload" else None


@pytest.fixture
def bench():
    return Bench()


def test_rows_share_the_full_pages_of_their_prompt(bench):
    search = bench.add(20)
    bench.run_until(search)
    first, *others = search.tables
    assert len(first) == 3
    assert all(table[:2] == first[:2] for table in others)
    assert len({table[2] for table in search.tables}) == WIDTH
    assert bench.pool.in_use == 2 + WIDTH


def test_a_row_that_dies_gives_its_pages_back(bench):
    search = bench.add(20)
    bench.run_until(search)
    assert isinstance(bench.act(), Window)
    bench.grow(search, 4)
    assert bench.pool.in_use == 2 + 2 * WIDTH
    # The pages of the last 4 tokens become full; two rows go on from the last one, and one from the first.
    bench.grow(search, 1, (2, 0, 2))
    assert [table[2] for table in search.tables].count(search.others[1][2]) == 2
    assert bench.pool.in_use == 2 + 2 + WIDTH
    bench.scheduler.end(search)
    assert bench.pool.in_use == 0


def test_a_search_waits_until_all_of_its_rows_have_pages():
    """Its prompt alone would fit."""
    bench = Bench(pages=13)
    first, second = bench.add(40, new=8), bench.add(20, new=8)
    bench.run_until(first)
    assert bench.pool.in_use == 8
    assert bench.pool.available == 5
    while isinstance(bench.act(), Chunk):
        pass
    assert not any(second.tables)
    assert second.slot is None
    bench.scheduler.end(first)
    bench.run_until(second)
    assert [len(table) for table in second.tables] == [3] * WIDTH


def test_only_as_many_searches_run_as_all_rows_are_for(bench):
    searches = [bench.add(20) for _ in range(3)]
    bench.run_until(searches[1])
    for _ in range(10):
        bench.act()
    assert [search.slot is not None for search in searches] == [True, True, False]


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
def test_pages_in_common_are_in_common_again(preemption):
    """And are computed once: those of a row from the first one on that no row before it has."""
    bench = Bench(preemption=preemption, prefix_cache="off")
    search = bench.add(20)
    bench.run_until(search)
    for parents in ((0, 1, 2), (1, 0, 1), (0, 1, 2), (0, 1, 1)):
        assert isinstance(bench.act(), Window)
        bench.grow(search, 4, parents)

    def shape():
        """For each row and page, the first row that has it."""
        tables = search.tables
        return [[next(row for row in range(WIDTH) if page in tables[row]) for page in table] for table in tables]

    before, used, length = shape(), bench.pool.in_use, len(search.tokens)
    bench.scheduler._make_room(search)
    bench.scheduler.check()
    assert bench.pool.in_use == 0
    chunks = []
    while search.stage is not Stage.RUNNING:
        action = bench.act()
        if isinstance(action, Chunk):
            chunks.append((action.row, action.start, action.count))
    held = bench.scheduler.held.pages_for(length)
    assert [row[:held] for row in shape()] == [row[:held] for row in before]
    assert bench.pool.in_use <= used + WIDTH
    computed = {row: sum(count for each, _, count in chunks if each == row) for row, *_ in chunks}
    expected = {0: length - 1, 1: length - 1 - 2 * PAGE, 2: length - 1 - 4 * PAGE}
    assert computed == ({} if preemption == "offload" else expected)


def test_later_prompts_find_prompts_and_no_text_of_a_row(bench):
    search = bench.add(20)
    bench.run_until(search)
    for _ in range(4):
        bench.act()
        bench.grow(search, 4)
        bench.scheduler.ran(4)
    prompt_pages = search.pages[:2]
    bench.scheduler.end(search)
    again = BeamSequence(9, [*search.tokens, 5, 6, 7], 60, bench.now, width=WIDTH)
    bench.scheduler.add(again)
    bench.act()
    assert [table[:2] for table in again.tables] == [prompt_pages] * WIDTH
    assert again.cached_tokens == 2 * PAGE


def test_a_search_that_may_need_more_than_there_is_does_not_fit(bench):
    small = Bench(pages=15)
    # 5 pages of a row, of which the 2 of the prompt are in common, are 2 + 3 * 3.
    assert small.scheduler.held.own_pages(small.add(20, new=18), "") == 11
    assert not small.scheduler.held.fits(small.add(20, new=42), "")
    assert bench.scheduler.held.fits(bench.add(20, new=42), "")
    # Whatever the prompt, a text as long as is promised fits.
    longest = small.scheduler.held.longest_text()
    assert small.scheduler.held.fits(small.add(7, new=longest - 7), "")
    assert not small.scheduler.held.fits(small.add(7, new=longest + PAGE - 7), "")


def test_a_search_that_begins_anew_forgets_what_it_found(bench):
    search = bench.add(20)
    bench.run_until(search)
    bench.grow(search, 4)
    bench.preempt(search)
    search.begin_anew()
    assert (search.tokens, search.texts, search.kept, search.saved) == ([0] * 20, [], None, None)
    assert search.owners(3, PAGE) == [[0, 0, row] for row in range(WIDTH)]
