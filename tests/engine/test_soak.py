"""Thousands of requests that end in every way, on pages that are always too few: none is lost and no page leaks."""

import itertools
import random
import threading
import time
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.errors import EngineBusy, InvalidOption, RequestCancelled, RequestTimedOut

WORDS = ("The old", "A small otter", "One grey", "The quick brown fox", "It was", "A", "Of all the things that")
# Two rows' longest texts do not fit together, so that there is always one that has to make room.
OPTIONS = {"max_rows": 4, "page_size": 8, "pages": 16, "prefill_chunk": 16, "steps_per_look": 4, "max_waiting": 64}


@pytest.mark.parametrize(
    ("count", "compared"),
    [pytest.param(48, 8, marks=pytest.mark.slow), pytest.param(20_000, 200, marks=pytest.mark.exhaustive)],
)
@pytest.mark.timeout(3600)
def test_no_request_is_lost_and_no_page_leaks(trained_folder, count, compared):
    lm = jaxinfer.load(trained_folder, max_len=100)
    numbers, ends, kept, held = itertools.count(), [], {}, []
    with lm.engine(strategy="prompt_lookup", **OPTIONS) as engine:

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while (number := next(numbers)) < count:
                ends.append(
                    (number, serve_one(engine, rng, number, kept if number % (count // compared) == 0 else None))
                )
                if number % (count // 8) == count // 16:
                    held.append(resident_bytes())

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        deadline = time.monotonic() + 30.0
        while not engine._groups[0].core.scheduler.is_idle and time.monotonic() < deadline:
            time.sleep(0.01)
        engine._groups[0].core.scheduler.check()
        metrics = engine.metrics()
        assert (metrics.pages_in_use, metrics.waiting, metrics.running) == (0, 0, 0)
    assert metrics.preemptions > count / 100
    assert sorted(number for number, _ in ends) == list(range(count))
    assert {end for _, end in ends} == {"whole", "cancelled", "late", "left", "too long"}
    # The first eighths compile programs and fill what is cached.
    assert max(held[-3:]) - held[len(held) // 2] < 64 * 2**20
    assert len(kept) == compared
    for (prompt, tokens, sampling), result in kept.items():
        (alone,) = lm.generate(prompt, max_new_tokens=tokens, sampling=sampling)
        assert (result.tokens, result.logprobs, result.text) == (alone.tokens, alone.logprobs, alone.text)


def serve_one(engine, rng: random.Random, number: int, kept: dict | None) -> str:
    """Send a request and end it in one of five ways; return how it ended. One whose result is kept ends whole."""
    prompt, tokens = " ".join(rng.choices(WORDS, k=rng.randrange(1, 3))), rng.randrange(1, 50)
    sampling = SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=number, logprobs=True, ignore_eos=True)
    way = rng.choice(["whole"] * 6 + ["cancelled", "late", "left", "too long"]) if kept is None else "whole"
    if way == "too long":
        with pytest.raises(InvalidOption, match="shorten it"):
            engine.submit("x" * 101, max_new_tokens=1)
        return way
    timeout = 0.001 if way == "late" else None
    while True:
        try:
            request = engine.submit(prompt, max_new_tokens=tokens, sampling=sampling, timeout=timeout)
            break
        except EngineBusy:
            time.sleep(0.01)
    if way == "left":
        for _ in request:
            break
        return way
    if way == "cancelled":
        request.cancel()
    try:
        result = request.result(600.0)
    except RequestCancelled:
        assert way == "cancelled"
    except RequestTimedOut:
        assert way == "late"
    else:
        assert len(result.tokens) == tokens
        if kept is not None:
            kept[prompt, tokens, sampling] = result
    return way


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
