"""An engine of several groups of devices: each request is one group's, and its text is what it is alone.

Both groups of these tests are of one device; `tests/parallel/on_devices` has groups of several.
"""

import time
from contextlib import contextmanager

import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.engine.assembly import GroupModel
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.routing import Standing, choose_group
from jaxinfer.errors import EngineBusy, EngineClosed, EngineError
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONFIG = EngineConfig(max_rows=4, page_size=8, pages=40, prefill_chunk=16, steps_per_look=4, max_waiting=20)
PROMPTS = [list(range(first, first + 20)) for first in range(2, 26, 3)]
ENDLESS = SamplingParams(temperature=1.5, ignore_eos=True)


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), max_len=100)


@contextmanager
def opened(lm):
    group = GroupModel(lm.programs, lm.params, parse_strategy("autoregressive"), num_groups=2)

    def make_requests(prompts, max_new_tokens, sampling, adapter=None):
        return lm._requests(prompts, max_new_tokens, sampling, group.strategy, adapter)

    engine = Engine(
        [group, group],
        CONFIG,
        max_len=100,
        eos_token_ids=(),
        tokenizer=lambda: None,
        make_requests=make_requests,
    )
    with engine:
        yield engine


@pytest.fixture(scope="module")
def shared_engine(lm):
    with opened(lm) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    wait_for(lambda: all(group.core.scheduler.is_idle for group in shared_engine._groups))
    for group in shared_engine._groups:
        group.core.scheduler.check()
    assert shared_engine.metrics().pages_in_use == 0


def wait_for(condition):
    deadline = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize(
    ("standings", "chosen"),
    [
        ([(4, 0, 0), (4, 0, 0)], 0),
        ([(4, 2, 0), (4, 1, 0)], 1),
        ([(4, 3, 64), (4, 0, 32)], 0),
        ([(4, 4, 64), (4, 3, 32)], 1),
        ([(4, 6, 64), (4, 5, 0)], 1),
        ([(4, 5, 32), (4, 5, 64)], 1),
    ],
    ids=["the first", "fewest", "most cached", "a free row", "none free: fewest", "none free: as many"],
)
def test_a_request_goes_where_its_beginning_is_or_where_there_is_room(standings, chosen):
    assert choose_group([Standing(*each) for each in standings]) == chosen


@pytest.mark.slow
def test_requests_spread_over_groups_and_are_what_they_are_alone(lm, engine):
    expected = [lm.generate([prompt], max_new_tokens=10, sampling=ENDLESS)[0].tokens for prompt in PROMPTS]
    before = [group.core.metrics() for group in engine._groups]
    requests = [engine.submit(prompt, max_new_tokens=10, sampling=ENDLESS) for prompt in PROMPTS]
    assert [request.result(60.0).tokens for request in requests] == expected
    each = [group.core.metrics().finished - one.finished for group, one in zip(engine._groups, before)]
    assert each == [4, 4]
    found = engine.metrics()
    assert found.finished == sum(group.core.metrics().finished for group in engine._groups)
    # A group has its part of rows and pages.
    assert found.pages_free + found.pages_cached == 40
    assert [group.core.scheduler.num_slots for group in engine._groups] == [2, 2]
    assert engine.longest_text == min(100, 20 * CONFIG.page_size - 1)


def test_a_prompt_that_comes_again_finds_its_pages(engine):
    prompts = [[30 + at, *range(5, 30)] for at in range(4)]
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=2, sampling=ENDLESS).result(60.0)
    for prompt in reversed(prompts):
        again = engine.submit(prompt, max_new_tokens=2, sampling=ENDLESS)
        again.result(60.0)
        assert again.stats.cached_tokens >= 24


def test_a_named_prefix_is_in_every_group_until_it_is_released(engine):
    system = list(range(40, 60))
    with engine.prefix(system) as prefix:
        assert prefix.tokens == 20
        requests = [engine.submit([*system, 3 + at], max_new_tokens=8, sampling=ENDLESS) for at in range(4)]
        for request in requests:
            request.result(60.0)
        assert [request.stats.cached_tokens for request in requests] == [20] * 4
        assert [len(group.core.scheduler.held.pinned) for group in engine._groups] == [1, 1]
    wait_for(lambda: not any(group.core.scheduler.held.pinned for group in engine._groups))


def test_those_that_wait_are_counted_over_all_groups_and_can_be_cancelled(engine):
    requests = []

    def submit_many():
        for at in range(60):
            requests.append(engine.submit([2 + at, 3], max_new_tokens=90, sampling=ENDLESS))

    with pytest.raises(EngineBusy, match=r"^20 requests wait already"):
        submit_many()
    assert len(requests) >= 20
    before = [group.core.metrics().cancelled for group in engine._groups]
    for request in requests:
        request.cancel()
    wait_for(lambda: all(request.done for request in requests))
    assert all(group.core.metrics().cancelled > count for group, count in zip(engine._groups, before))


def test_a_group_that_fails_ends_its_requests_and_the_engine_but_not_those_of_others(lm):
    with opened(lm) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=60, sampling=ENDLESS)
        second = engine.submit(PROMPTS[1], max_new_tokens=60, sampling=ENDLESS)

        def fails(now):
            raise RuntimeError("a mistake of ours")

        engine._groups[1].core.scheduler.next = fails
        with pytest.raises(EngineError, match="a mistake of ours"):
            second.result(60.0)
        assert len(first.result(60.0).tokens) == 60
        assert not engine.is_open
        wait_for(lambda: engine._groups[0].num_sequences == 0)
        with pytest.raises(EngineClosed, match="a mistake of ours"):
            engine.submit(PROMPTS[2])
