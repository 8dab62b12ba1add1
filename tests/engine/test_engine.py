"""The engine as its users see it: threads submit, iterate, cancel and close; bad input is one clear error."""

import asyncio
import gc
import threading
import time

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.engine.config import EngineConfig
from jaxinfer.errors import (
    EngineBusy,
    EngineClosed,
    EngineError,
    InvalidOption,
    RequestCancelled,
    RequestTimedOut,
)
from tests.toys import encode_bytes

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
    scheduler = shared_engine._core.scheduler
    while not (scheduler.is_idle and scheduler.pool.in_use == 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    scheduler.check()
    assert shared_engine.metrics().pages_in_use == 0


def endless(seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, ignore_eos=True)


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


def test_a_request_that_is_cancelled_ends_alone(engine):
    other = engine.submit("The old", max_new_tokens=40)
    request = engine.submit("A small", max_new_tokens=150, sampling=endless())
    next(iter(request))
    request.cancel()
    with pytest.raises(RequestCancelled):
        request.result(60.0)
    assert other.result(60.0).tokens
    request.cancel()


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
        assert prefix.tokens == len(system) // 8 * 8
        request = engine.submit(prompt, max_new_tokens=10)
        assert request.result(60.0).tokens == lm.generate([prompt], max_new_tokens=10)[0].tokens
        assert request.stats.cached_tokens == prefix.tokens
        assert engine.metrics().pages_in_use == prefix.tokens // 8
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
    ]:
        with pytest.raises(InvalidOption, match=message):
            engine.submit(**wrong)
    with pytest.raises(InvalidOption, match="less than a page"):
        engine.prefix("a")
    with pytest.raises(InvalidOption, match="has an engine that runs"):
        lm.engine()


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


def test_closing_waits_for_what_runs_and_takes_no_more(trained_folder):
    lm = jaxinfer.load(trained_folder, max_len=200)
    engine = lm.engine(**OPTIONS)
    request = engine.submit("The old", max_new_tokens=20)
    engine.close()
    assert request.result(0.0).tokens
    engine.close()
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


def test_a_failure_of_the_device_ends_the_requests_that_it_hit_and_no_others(lm, engine, monkeypatch):
    options = {"max_new_tokens": 150, "sampling": endless(3)}
    expected = lm.generate("The old", **options)[0].tokens
    survivor = engine.submit("The old", **options)
    next(iter_without_end(survivor))
    device = engine._core._device
    compute, calls = device.compute, []

    def fails_once(*arguments):
        if not calls:
            calls.append(1)
            raise RuntimeError("out of luck")
        return compute(*arguments)

    monkeypatch.setattr(device, "compute", fails_once)
    victim = engine.submit("A small", max_new_tokens=10)
    with pytest.raises(EngineError, match="the device failed: RuntimeError: out of luck"):
        victim.result(60.0)
    assert not survivor.done
    assert survivor.result(60.0).tokens == expected


def iter_without_end(request):
    """Yield pieces without cancelling the request when nobody reads on."""
    while True:
        with request._changed:
            request._changed.wait_for(lambda: request._pieces)
            yield request._pieces[0]


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
        ({"strategy": "beam:width=2"}, "beam does not run in an engine"),
        ({"strategy": "nonsense"}, "nonsense"),
    ],
)
def test_wrong_options(trained_folder, options, message):
    lm = jaxinfer.load(trained_folder, max_len=200)
    with pytest.raises(InvalidOption, match=message):
        lm.engine(**options)
    assert not lm._has_engine
