"""Under load nothing is lost, no answer is wrong in any bit, no page leaks, and memory stays as it was.

A third of the requests come first, so that what is made once is made.
"""

import gc
import random
import resource
import time
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.server.http.keys import read_keys
from tests.server.harness import ENGINE, MODEL, SECONDS, Running, running
from tests.server.load import KEY, Clients, Question
from tests.server.test_law import PROMPTS, bits, draw_request

# Of the process, clients and all; what the allocator keeps differs by some megabytes from run to run.
MOST_GROWTH = 48 * 2**20
LOAD = {**ENGINE, "max_rows": 4, "pages": 120, "max_waiting": 512}
BODY_BYTES = 20_000


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def questions(lm: LanguageModel, count: int) -> list[Question]:
    """Return requests with the answers of the library."""
    rng, made = random.Random(11), []
    for number in range(count):
        prompt, fields = rng.choice(PROMPTS), {**draw_request(rng), "n": 1}
        sampling = SamplingParams(**fields, logprobs=True)
        (result,) = lm.generate([prompt], max_new_tokens=24, sampling=sampling, batch_size=1)
        own = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "logprobs": 0, "return_token_ids": True}
        own["priority"] = number % 3
        made.append(Question({**own, **fields}, bits(result)))
    return made


def test_a_few_clients_of_every_kind(server: Running) -> None:
    failed = server.engine.metrics().failed  # other tests let requests fail
    clients = Clients(server.address, questions(server.lm, 2), BODY_BYTES, has_keys=False)
    clients.run(24, 8, seed=1)
    server.until(lambda: server.is_idle, SECONDS)
    assert clients.figures.wrong == []
    assert sum(clients.figures.ends.values()) == 24
    assert {"whole", "stream", "leaves"} < set(clients.figures.ends)
    assert server.engine.metrics().failed == failed


@pytest.mark.parametrize(
    ("count", "connections"),
    [
        pytest.param(120, 32, id="many", marks=pytest.mark.exhaustive),
        pytest.param(5000, 64, id="most", marks=pytest.mark.exhaustive),
    ],
)
def test_load(trained_folder: Path, count: int, connections: int) -> None:
    lm = jaxinfer.load(trained_folder, max_len=200)
    asked, keys = questions(lm, 16), read_keys([KEY], None)
    with running(lm, engine=LOAD, keys=keys, max_body_bytes=BODY_BYTES, grace_seconds=0.1) as server:
        clients = Clients(server.address, asked, BODY_BYTES, has_keys=True)
        clients.run(count // 3, connections, seed=1)
        server.until(lambda: server.is_idle, SECONDS)
        clients.figures.forget_times()
        before, began = resident_bytes(), time.monotonic()
        clients.run(count - count // 3, connections, seed=2)
        seconds = time.monotonic() - began
        server.until(lambda: server.is_idle, SECONDS)
        growth, figures = resident_bytes() - before, clients.figures
        print(f"{figures.ends}\n{(count - count // 3) / seconds:.1f} requests a second; {figures.times()}")
        print(f"memory grew by {growth / 2**20:.1f} MiB from {before / 2**20:.0f}")
        assert figures.wrong == []
        assert sum(figures.ends.values()) == count
        assert len(figures.ends) == 8
        assert server.engine.metrics().failed == 0
        assert growth < MOST_GROWTH
