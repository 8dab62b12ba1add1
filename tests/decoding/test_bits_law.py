"""A row's bits are those of plain decoding alone whatever is around it: batch, place, cache, cuts of prompts, threads.

A strategy meets a draw of all of these, made from its name: a family, a dtype, 2 to 17 rows, the cache's length and how
prompts are cut; in the wide run one drafter and one sum. The rest is marked exhaustive.
"""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding import programs
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from tests.decoding.covered_models import MODELS, OTHER_SAMPLINGS, SAMPLINGS, VOCAB_SIZE, random_model
from tests.decoding.rows import Row, request, run
from tests.decoding.strategy_cases import CASES

DTYPES, BATCHES, CUTS, MAX_LENGTHS = ("float32", "bfloat16", "float16"), (2, 5, 17), (16, 32, 256), (160, 256)
NUM_NEW = 24
# Drafts of the model's own layers, and a sum of drafters; the second shares its model with a test below.
WIDE = ("layerskip",)
# The first prompts are of one token and of one that ends on a cut; others cross cuts.
LENGTHS = (1, 32, 17, 70, 33, 5, 64, 16, 100, 2, 48, 31, 9, 90, 15, 65, 3)
Texts = list[tuple[list[int], bytes]]


def asked(count: int, seed: int = 0) -> list[Request]:
    """Return so many requests, no two alike, with every way of sampling; the first rows stop soonest."""
    rng, samplings = np.random.default_rng(seed), [*SAMPLINGS, SamplingParams(temperature=1.3, top_p=0.5, seed=9)]
    samplings += OTHER_SAMPLINGS
    limits = [min(NUM_NEW, 1 + 4 * row) for row in range(count)]
    return [
        request(rng.integers(1, VOCAB_SIZE, length).tolist(), limits[row], samplings[row % len(samplings)])
        for row, length in enumerate(LENGTHS[:count])
    ]


def texts(rows: list[Row]) -> Texts:
    return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]


@pytest.fixture(scope="module")
def alone() -> Callable[[str, str], tuple[LanguageModel, list[Row]]]:
    """Return a function that makes each model once, and what it writes when every request is alone."""
    made: dict[tuple[str, str, Any], tuple[LanguageModel, list[Row]]] = {}

    def get(model: str, dtype: str) -> tuple[LanguageModel, list[Row]]:
        # Only programs that are compiled in one way have the same bits, and the runs compile in two.
        key = model, dtype, jax.config.read("jax_disable_most_optimizations")
        if key not in made:
            lm = random_model(model, dtype=dtype)
            made[key] = lm, [run(lm, [one])[0] for one in asked(len(LENGTHS))]
        return made[key]

    return get


def check(
    monkeypatch: Any, alone: Any, name: str, model: str, dtype: str, count: int, cut: int, max_len: int, at: int
) -> None:
    """Decode a batch of requests, that at place ``at`` first, in a cache and with cuts of these sizes."""
    lm, expected = alone(model, dtype)
    monkeypatch.setattr(programs, "PREFILL_CHUNK", cut)
    other = LanguageModel(lm.config, lm.params, lm.backend, max_len=max_len)
    requests = asked(len(LENGTHS))
    order = [*range(at, len(LENGTHS)), *range(at)][:count]
    written = [[*requests[row].prompt, *expected[row].tokens] for row in range(5)]
    strategy = CASES[name].strategy(model, other, written)
    found = run(other, [requests[row] for row in order], strategy)
    assert texts(found) == texts([expected[row] for row in order])
    if strategy.max_depth and count > 2:
        assert sum(row.counts.accepted for row in found) > 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in WIDE else pytest.mark.exhaustive) for name in CASES],
)
def test_bits_do_not_depend_on_what_is_around_a_row(monkeypatch, alone, name):
    rng = random.Random(name)
    # One model for each dtype, so that plain decoding is compiled three times.
    model, dtype = rng.choice([("gemma2", "bfloat16"), ("gpt2", "float16"), ("opt", "float32")])
    drawn = rng.choice(BATCHES), rng.choice(CUTS), rng.choice(MAX_LENGTHS), rng.randrange(len(LENGTHS))
    check(monkeypatch, alone, name, model, dtype, *drawn)


# Groups, corrections and a shared expert; attention sinks beside a window, and experts with biases and limits; latent
# attention, which takes none of the adapters that streams have.
OF_EXPERTS = [
    (name, model)
    for model in ("glm4_moe", "gpt_oss", "deepseek_v3")
    for name in CASES
    if model != "deepseek_v3" or "streams" not in name
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "model"), OF_EXPERTS)
def test_bits_of_experts_do_not_depend_on_what_is_around_a_row(monkeypatch, alone, name, model):
    rng = random.Random(name)
    check(monkeypatch, alone, name, model, rng.choice(DTYPES), rng.choice(BATCHES), rng.choice(CUTS), 256, 3)


@pytest.mark.slow
def test_seventeen_rows_cut_in_pieces_of_sixteen(monkeypatch, alone):
    check(monkeypatch, alone, "prompt_lookup", "gemma2", "bfloat16", 17, 16, 256, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "model", "dtype", "count", "cut", "max_len"),
    list(product(CASES, MODELS, DTYPES, BATCHES, CUTS, MAX_LENGTHS)),
)
def test_all_bits_do_not_depend_on_what_is_around_a_row(monkeypatch, alone, name, model, dtype, count, cut, max_len):
    check(monkeypatch, alone, name, model, dtype, count, cut, max_len, count % 7)


def digest() -> str:
    """Return a digest of what a batch of a model is, in two dtypes, greedy and sampled."""
    told = hashlib.sha256()
    for dtype in ("float32", "bfloat16"):
        lm = random_model("gemma2", dtype=dtype)
        told.update(repr(texts(run(lm, asked(5), Autoregressive()))).encode())
    return told.hexdigest()


ON_ONE_PROCESSOR = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from tests.decoding.test_bits_law import digest
print(digest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors are chosen by Linux's sched_setaffinity")
def test_one_thread_has_the_bits_of_several():
    command, folder = [sys.executable, "-c", ON_ONE_PROCESSOR], os.path.dirname(__file__) + "/../.."
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    child = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip() == digest()
