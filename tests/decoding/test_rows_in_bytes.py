"""On a model whose cache is in bytes every strategy writes what plain decoding on it writes, in every bit.

Engines, which share, copy and restore pages in bytes, are in `tests.engine.test_law`.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding import programs
from jaxinfer.models.decoder import create_cache
from jaxinfer.ops.rows_in_bytes import CACHE_DTYPES, holds_bytes
from tests.decoding.covered_models import MODELS, OTHER_SAMPLINGS, VOCAB_SIZE, random_model
from tests.decoding.rows import Row, request, run
from tests.decoding.strategy_cases import CASES

WIDE = ("prompt_lookup", "int8"), ("triforce", "int8"), ("layerskip", "fp8")
# The first prompt is cut, and exceeds the model's window.
LENGTHS = (33, 17)
REQUESTS = [
    request(np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist(), 20, sampling)
    for length, sampling in zip(LENGTHS, OTHER_SAMPLINGS)
]
Made = Callable[..., tuple[LanguageModel, list[Row]]]


@pytest.fixture(scope="module")
def made() -> Made:
    """Return a function that makes each model once, and what plain decoding on it writes of each prompt alone."""
    found: dict[tuple[str, str], tuple[LanguageModel, list[Row]]] = {}

    def get(model: str, cache_dtype: str) -> tuple[LanguageModel, list[Row]]:
        if (model, cache_dtype) not in found:
            lm = random_model(model, cache_dtype=cache_dtype)
            found[model, cache_dtype] = lm, [run(lm, [one])[0] for one in REQUESTS]
        return found[model, cache_dtype]

    return get


def bits(rows: list[Row]) -> list[tuple[list[int], bytes]]:
    return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]


def check(monkeypatch, made: Made, model: str, cache_dtype: str, name: str) -> None:
    lm, expected = made(model, cache_dtype)
    monkeypatch.setattr(programs, "PREFILL_CHUNK", 16)
    other = LanguageModel(lm.config, lm.params, lm.backend)
    texts = [[*one.prompt, *row.tokens] for one, row in zip(REQUESTS, expected)]
    strategy = CASES[name].strategy(model, other, texts)
    found = run(other, REQUESTS, strategy)
    assert bits(found) == bits(expected)
    assert not strategy.max_depth or sum(row.counts.accepted for row in found) > 0


# Gemma 2 has layers with windows, whose caches are rings.
@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [pytest.param(*each, marks=pytest.mark.exhaustive) for each in WIDE],
)
def test_texts_are_those_of_plain_decoding_on_the_same_cache(monkeypatch, made, name, cache_dtype):
    check(monkeypatch, made, "gemma2", cache_dtype, name)


@pytest.mark.slow
def test_a_cache_in_bytes_holds_bytes_and_changes_little(made):
    lm, expected = made("gemma2", "int8")
    (request, *_), (row, *_) = REQUESTS, expected
    cache = create_cache(lm.config, 1, 64, lm.backend)
    assert all(holds_bytes(leaf.dtype) for leaf in jax.tree.leaves(cache))
    wide = LanguageModel(lm.config, lm.params, replace(lm.backend, cache_dtype="float32"))
    text = [*request.prompt, *row.tokens]
    logits, others = (np.asarray(each.logits([text])) for each in (lm, wide))
    assert 0 < np.abs(logits - others).mean() < 0.01 * others.std()


@pytest.mark.exhaustive
def test_a_streaming_cache_in_bytes_changes_little(made):
    """Sinks use queries of their own, which are turned back before they are evened out."""
    lm, _ = made("granite", "int8")
    layout = "streaming:sinks=4,window=32"
    wide, narrow = (
        LanguageModel(lm.config, lm.params, replace(lm.backend, cache_dtype=dtype), cache=layout)
        for dtype in ("float32", "int8")
    )
    asked = request(np.random.default_rng(0).integers(1, VOCAB_SIZE, 60).tolist(), 20)
    (row,), (other,) = (run(each, [asked]) for each in (narrow, wide))
    assert row.tokens == other.tokens
    differences = np.abs(np.subtract(row.logprobs, other.logprobs))
    assert 0 < differences.mean() < 0.02


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_texts_of_every_strategy_are_those_of_plain_decoding(monkeypatch, made, name, model, cache_dtype):
    check(monkeypatch, made, model, cache_dtype, name)
