"""The engine as its users see it: threads submit, iterate, cancel and close; bad input is one clear error."""

import asyncio
import atexit
import gc
import sys
import threading
import time

import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.engine import check_options
from jaxinfer.engine.prefix import PrefixRequest
from jaxinfer.errors import (
    EngineBusy,
    EngineClosed,
    EngineError,
    InvalidOption,
    InvalidTokenizer,
    RequestCancelled,
    RequestTimedOut,
)
from tests.toys import TINY_LLAMA, encode_bytes, float32_backend, random_params

PROMPTS = ["The old", "A small otter", "One grey", "The quick"]
SAMPLED = [SamplingParams(logprobs=True), SamplingParams(temperature=0.9, seed=3, logprobs=True)]
OPTIONS = {"max_rows": 2, "page_size": 8, "pages": 40, "prefill_chunk": 16, "steps_per_look": 4}


@pytest.fixture(scope="module")
def lm(trained_folder):
    return jaxinfer.load(trained_folder, max_len=200)


@pytest.fixture(scope="module")
def shared_engine(lm):
    """An engine that the tests share which leave it as it was: its programs are compiled once."""
    with lm.engine(**OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    deadline = time.monotonic() + 10.0
    scheduler = shared_engine._groups[0].core.scheduler
    while not (scheduler.is_idle and scheduler.held.pool.in_use == 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    scheduler.check()
    assert shared_engine.metrics().pages_in_use == 0


def endless(seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, ignore_eos=True)


@pytest.mark.exhaustive
def test_results_are_those_of_generate(lm, engine):
    jobs = [(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLED]
    requests = [engine.submit(prompt, max_new_tokens=30, sampling=sampling) for prompt, sampling in jobs]
    for (prompt, sampling), request in zip(jobs, requests):
        (expected,) = lm.generate(prompt, max_new_tokens=30, sampling=sampling)
        found = request.result(60.0)
        for field in ("prompt", "text", "tokens", "logprobs", "finish_reason", "sample"):
            assert getattr(found, field) == getattr(expected, field)
        assert found.stats.new_tokens == expected.stats.new_tokens
        stats = request.stats
        assert stats.prompt_tokens == len(encode_bytes(prompt))
        assert 0 <= stats.queue_seconds <= stats.first_token_seconds <= stats.token_seconds[-1]
        assert len(stats.token_seconds) == len(found.tokens)


def test_a_request_yields_its_text_as_it_comes(lm, engine):
    (expected,) = lm.generate("The old", max_new_tokens=30)
    pieces = list(engine.submit("The old", max_new_tokens=30))
    assert "".join(piece.text for piece in pieces) == expected.text
    assert tuple(token for piece in pieces for token in piece.tokens) == expected.tokens
    assert [piece.result is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 3


def test_async_for(engine):
    async def read(prompt):
        return "".join([piece.text async for piece in engine.submit(prompt, max_new_tokens=20)])

    async def read_all():
        return await asyncio.gather(*(read(prompt) for prompt in PROMPTS))

    assert asyncio.run(read_all()) == [engine.submit(prompt, max_new_tokens=20).result(60.0).text for prompt in PROMPTS]


@pytest.mark.slow
def test_stop_strings_and_samples(lm, engine):
    sampling = SamplingParams(temperature=0.9, seed=4, n=3, stop=["e"])
    expected = lm.generate("The old", max_new_tokens=30, sampling=sampling)
    request = engine.submit("The old", max_new_tokens=30, sampling=sampling)
    found = request.results(60.0)
    assert [(one.text, one.sample, one.finish_reason) for one in found] == [
        (one.text, one.sample, one.finish_reason) for one in expected
    ]
    with pytest.raises(InvalidOption, match="n is 3"):
        request.result()
    # Of the first sample, up to its stop string.
    assert len(request.stats.token_seconds) == len(found[0].tokens)


@pytest.mark.parametrize("reads", ["threads", "async"])
def test_pieces_of_several_samples_come_side_by_side(lm, engine, reads):
    sampling = SamplingParams(temperature=0.9, seed=4, n=3, stop=["e"], logprobs=True)
    expected = lm.generate("The old", max_new_tokens=30, sampling=sampling)
    request = engine.submit("The old", max_new_tokens=30, sampling=sampling)

    async def read():
        return [piece async for piece in request]

    pieces = list(request) if reads == "threads" else asyncio.run(read())
    for one in expected:
        own = [piece for piece in pieces if piece.sample == one.sample]
        assert [piece.result is not None for piece in own] == [False] * (len(own) - 1) + [True]
        assert "".join(piece.text for piece in own) == one.text == own[-1].result.text
        assert tuple(token for piece in own for token in piece.tokens) == one.tokens
        assert tuple(value for piece in own for value in piece.logprobs) == one.logprobs
    assert [piece.sample for piece in pieces] != sorted(piece.sample for piece in pieces)


def test_the_longest_text_is_bounded_by_the_context_and_by_the_pages(lm, engine):
    assert engine.longest_text == lm.max_len == 200
    assert engine.is_open
    with engine.prefix("x" * 160):
        longest = engine.longest_text
        assert 40 < longest < lm.max_len
        engine.submit([2] * 20, max_new_tokens=longest - 20).cancel()
        with pytest.raises(InvalidOption, match="the request may need"):
            engine.submit([2] * 20, max_new_tokens=longest - 19)
    engine.submit("The old", max_new_tokens=2).result(60.0)  # after which the engine has seen the release
    assert engine.longest_text == lm.max_len


def test_a_request_that_is_cancelled_ends_alone(engine):
    other = engine.submit("The old", max_new_tokens=40)
    request = engine.submit("A small", max_new_tokens=150, sampling=endless())
    next(iter(request))
    request.cancel()
    with pytest.raises(RequestCancelled):
        request.result(60.0)
    assert 0 < request.stats.first_token_seconds <= request.stats.token_seconds[-1]
    assert other.result(60.0).tokens
    request.cancel()


@pytest.mark.parametrize("ends_by", ["cancelled", "timed_out", "failed"])
def test_all_samples_of_a_request_end_together_and_each_is_counted_once(engine, ends_by):
    before = engine.metrics()
    sampling = SamplingParams(temperature=1.5, seed=5, n=3, ignore_eos=True)
    how = {"timed_out": {"timeout": 0.05}, "failed": {"callback": lambda piece: 1 / 0}}.get(ends_by, {})
    request = engine.submit("A small", max_new_tokens=150, sampling=sampling, **how)
    if ends_by == "cancelled":
        request.cancel()
    error = {"cancelled": RequestCancelled, "timed_out": RequestTimedOut, "failed": EngineError}[ends_by]
    with pytest.raises(error):
        request.results(60.0)
    after = engine.metrics()
    names = ("finished", "cancelled", "timed_out", "failed")
    counted = {name: getattr(after, name) - getattr(before, name) for name in names}
    assert counted == {name: 3 if name == ends_by else 0 for name in names}


def test_whoever_stops_reading_ends_the_request(engine):
    request = engine.submit("A small", max_new_tokens=150, sampling=endless())
    reader = iter(request)
    next(reader)
    del reader
    gc.collect()
    with pytest.raises(RequestCancelled):
        request.result(60.0)


def test_a_request_out_of_time(engine):
    request = engine.submit("A small", max_new_tokens=150, sampling=endless(), timeout=0.001)
    with pytest.raises(RequestTimedOut):
        request.result(60.0)
    with pytest.raises(RequestTimedOut):
        list(request)


def test_waiting_for_a_result_has_its_own_timeout(engine):
    request = engine.submit("A small", max_new_tokens=150, sampling=endless())
    with pytest.raises(TimeoutError):
        request.result(0.001)
    request.cancel()


def test_a_callback_gets_every_piece_and_its_mistakes_are_its_own(engine):
    pieces = []
    good = engine.submit("The old", max_new_tokens=20, callback=pieces.append)
    bad = engine.submit("A small", max_new_tokens=20, callback=lambda piece: 1 / 0)
    text = good.result(60.0).text
    assert "".join(piece.text for piece in pieces) == text
    with pytest.raises(EngineError, match="callback raised ZeroDivisionError"):
        bad.result(60.0)


def test_a_callback_that_ends_the_program_ends_its_own_request(engine):
    bad = engine.submit("A small", max_new_tokens=20, callback=lambda piece: sys.exit(3))
    good = engine.submit("The old", max_new_tokens=20)
    with pytest.raises(EngineError, match="callback raised SystemExit"):
        bad.result()
    assert good.result().tokens
    assert engine.is_open


def test_a_bias_on_what_is_no_token_is_refused_before_anything_runs(engine):
    with pytest.raises(InvalidOption, match="logit_bias names token 1000000"):
        engine.submit("The old", sampling=SamplingParams(logit_bias={10**6: 1.0}))


def test_a_callback_may_submit_and_cancel_but_not_wait_for_the_engine(engine):
    refused, others = [], []

    def callback(piece):
        if others:
            return
        others.append(engine.submit("A small", max_new_tokens=5))
        for wait in (engine.close, lambda: engine.prefix("The old badger")):
            with pytest.raises(EngineError, match="waits for the engine") as caught:
                wait()
            refused.append(caught.value)
        request.cancel()

    request = engine.submit("The old", max_new_tokens=150, sampling=endless(), callback=callback)
    with pytest.raises(RequestCancelled):
        request.result(60.0)
    assert len(refused) == 2
    assert others[0].result(60.0).tokens


def test_many_threads_submit_at_once(lm, engine):
    expected = {prompt: lm.generate(prompt, max_new_tokens=15)[0].tokens for prompt in PROMPTS}
    found, errors = [], []

    def work(prompt):
        try:
            found.append((prompt, engine.submit(prompt, max_new_tokens=15).result(60.0).tokens))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in PROMPTS * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(found) == 16
    assert all(tokens == expected[prompt] for prompt, tokens in found)


def test_a_named_prefix_is_computed_once_and_kept_until_it_is_released(lm, engine):
    system = encode_bytes("The old badger walked to the river and ")
    prompt = [*system, *encode_bytes("sat")]
    with engine.prefix(system) as prefix:
        assert prefix.tokens == len(system) == 39
        request = engine.submit(prompt, max_new_tokens=10)
        assert request.result(60.0).tokens == lm.generate([prompt], max_new_tokens=10)[0].tokens
        assert request.stats.cached_tokens == prefix.tokens
        # Four full pages, and one with the rest, which requests copy.
        assert engine.metrics().pages_in_use == 5
        other = engine.submit(prompt, max_new_tokens=10, cache_salt="another tenant")
        other.result(60.0)
        assert other.stats.cached_tokens == 0
    prefix.release()


def test_what_can_never_be_served_is_refused_at_once(lm, engine):
    for wrong, message in [
        ({"prompt": encode_bytes("a" * 200)}, "context has room for 200"),
        ({"prompt": []}, "empty"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "a", "timeout": -1.0}, "timeout"),
        ({"prompt": "a", "priority": True}, "priority"),
        # Each of these would reach the engine's thread, and end it.
        ({"prompt": "a", "priority": 10**400}, "priority"),
        ({"prompt": "a", "timeout": float("inf")}, "timeout"),
        ({"prompt": "a", "timeout": float("nan")}, "timeout"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt"),
        ({"prompt": "a", "sampling": 3}, "sampling is SamplingParams"),
        ({"prompt": "a", "sampling": "a"}, "sampling is SamplingParams"),
    ]:
        with pytest.raises(InvalidOption, match=message):
            engine.submit(**wrong)
    # A run-time type checker would raise its own message first.
    for wrong in (
        {"timeout": "a"},
        {"timeout": True},
        {"timeout": 10**5000},
        {"priority": 1.5},
        {"cache_salt": None},
        {"callback": 3},
    ):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            check_options(**wrong)
    assert engine.submit("a", max_new_tokens=2, timeout=1e9).result(60.0).tokens
    with pytest.raises(InvalidOption, match="has an engine that runs"):
        lm.engine()


def test_stop_strings_need_a_tokenizer():
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), max_len=64)
    with lm.engine(**OPTIONS) as engine, pytest.raises(InvalidTokenizer, match="no tokenizer"):
        engine.submit([5, 6], sampling=SamplingParams(stop=["e"]))


@pytest.mark.parametrize("where", ["scheduler", "inbox"])
def test_whoever_waits_hears_of_it_when_the_engine_itself_fails(where):
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), max_len=64)
    engine = lm.engine(**OPTIONS)

    def fails(*arguments):
        raise RuntimeError("a mistake of ours")

    (group,), may_fail = engine._groups, threading.Event()
    if where == "scheduler":
        group.core.scheduler.next = fails
    else:
        # What is posted while it waits is never added.
        with group._changed:
            group._post(lambda: may_fail.wait(10.0) and fails())
    found = []

    def wait():
        try:
            engine.prefix(list(range(2, 30)))
        except EngineError as error:
            found.append(str(error))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    if where == "inbox":
        request = engine.submit([5, 6])
        may_fail.set()
        with pytest.raises(EngineError, match="a mistake of ours"):
            request.result(10.0)
    waiter.join(10.0)
    assert "a mistake of ours" in found[0]
    engine.close()
    with pytest.raises(EngineClosed, match="a mistake of ours"):
        engine.submit([5, 6])


def test_an_engine_that_nobody_closed_ends_before_the_interpreter_does(monkeypatch):
    """Else the interpreter crashes, where it ends while a thread is inside a program."""
    at_exit, register = [], atexit.register
    monkeypatch.setattr(atexit, "register", lambda *given: at_exit.append(given[0]) or register(*given))
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), max_len=64)
    engine = lm.engine(**OPTIONS)
    at_exit[-1]()
    assert not engine._groups[0].thread.is_alive()
    engine.close()


def test_a_prefix_that_nobody_waits_for_any_more_is_not_kept(engine, monkeypatch):
    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(PrefixRequest, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.prefix("The old badger walked to the river")


def test_a_text_longer_than_all_pages_is_refused(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    message = r"may need \d+ pages of 8 tokens, but the engine has 10"
    with lm.engine(**{**OPTIONS, "pages": 10}) as engine, pytest.raises(InvalidOption, match=message):
        engine.submit("a" * 30, max_new_tokens=60)


def test_too_many_that_wait_are_refused(trained_folder):
    with jaxinfer.load(trained_folder, max_len=200).engine(**{**OPTIONS, "max_rows": 1, "max_waiting": 2}) as engine:
        requests = []

        def submit_many():
            for _ in range(10):
                requests.append(engine.submit("A", max_new_tokens=100, sampling=endless()))

        with pytest.raises(EngineBusy, match="2 requests wait already"):
            submit_many()
        assert 2 <= len(requests) <= 4
        for request in requests:
            request.cancel()


@pytest.mark.slow
def test_closing_waits_for_what_runs_and_takes_no_more(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    engine = lm.engine(**OPTIONS)
    request = engine.submit("The old", max_new_tokens=20)
    engine.close()
    assert request.result(0.0).tokens
    engine.close()
    # Whoever keeps a closed engine keeps none of the device's memory.
    assert not vars(engine._groups[0].core._device).keys() & {"_pools", "_rows"}
    assert engine.metrics().finished == 1
    with pytest.raises(EngineClosed):
        engine.submit("The old")
    with pytest.raises(EngineClosed):
        engine.prefix("The old badger")
    requests = []

    def fail_inside():
        with lm.engine(**OPTIONS) as engine:
            requests.append(engine.submit("A small", max_new_tokens=150, sampling=endless()))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_inside()
    with pytest.raises(RequestCancelled):
        requests[0].result(0.0)


def fail_once(device, monkeypatch):
    """Let the next chunk of a prompt fail."""
    compute, calls = device.compute, []

    def fails_once(*arguments):
        if not calls:
            calls.append(1)
            raise RuntimeError("out of luck")
        return compute(*arguments)

    monkeypatch.setattr(device, "compute", fails_once)


def test_a_failure_of_the_device_ends_the_requests_that_it_hit_and_no_others(lm, engine, monkeypatch):
    options = {"max_new_tokens": 150, "sampling": endless(3)}
    expected = lm.generate("The old", **options)[0].tokens
    survivor = engine.submit("The old", **options)
    next(iter_without_end(survivor))
    fail_once(engine._groups[0].core._device, monkeypatch)
    victim = engine.submit("A small", max_new_tokens=10)
    with pytest.raises(EngineError, match="the device failed: RuntimeError: out of luck"):
        victim.result(60.0)
    assert not survivor.done
    assert survivor.result(60.0).tokens == expected


def test_a_named_prefix_outlives_a_failure_of_the_device(engine, monkeypatch):
    system = encode_bytes("The old badger walked to the river and ")
    with engine.prefix(system) as prefix:
        fail_once(engine._groups[0].core._device, monkeypatch)
        with pytest.raises(EngineError, match="the device failed"):
            engine.submit("A small", max_new_tokens=10).result(60.0)
        # The engine's thread has dealt with the failure, and then with the prefix.
        is_past, deadline = threading.Event(), time.monotonic() + 10.0
        with engine._groups[0]._changed:
            engine._groups[0]._post(is_past.set)
        assert is_past.wait(10.0)
        while not engine._groups[0].core.scheduler.held.pinned and time.monotonic() < deadline:
            time.sleep(0.01)
        request = engine.submit([*system, *encode_bytes("sat")], max_new_tokens=5)
        request.result(60.0)
        assert request.stats.cached_tokens == prefix.tokens
        assert engine.metrics().pages_in_use == -(-prefix.tokens // 8)


def iter_without_end(request):
    """Yield pieces without cancelling the request when nobody reads on."""
    while True:
        with request._changed:
            request._changed.wait_for(lambda: request._pieces)
            yield request._pieces[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "max_rows=0 is not a whole number of 1 or more"),
        ({"page_size": 12}, "page_size=12 is not a power of two"),
        ({"prefill_chunk": True}, "prefill_chunk=True"),
        ({"memory": 0}, "memory=0 is not a number above 0"),
        ({"memory": 1000}, "less than two pages"),
        ({"preemption": "drop"}, "not one of offload, recompute"),
        ({"prefix_cache": "some"}, "not one of exact, all, off"),
        ({"rows": 3}, "unknown option 'rows'; its options are: max_rows"),
        ({"config": EngineConfig(), "max_rows": 3}, "not both"),
        ({"strategy": "beam:width=3", "max_rows": 2}, "max_rows=2 is less than the width=3 rows of a beam search"),
        ({"strategy": "mcts"}, "mcts does not run in an engine"),
        ({"strategy": "nonsense"}, "nonsense"),
        ({"config": {"max_rows": 3}}, "is not an EngineConfig"),
    ],
)
def test_wrong_options(trained_folder, options, message):
    lm = jaxinfer.load(trained_folder, max_len=200)
    with pytest.raises(InvalidOption, match=message):
        lm.engine(**options)
    assert not lm._has_engine
