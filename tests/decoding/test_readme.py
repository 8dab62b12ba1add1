"""The guide's strategy works as it stands there: alone and in sums it gives plain decoding's tokens, and it learns."""

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding import registry
from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, Row, least_margin, request, run
from tests.decoding.scripted import Chain

GUIDE = Path(registry.__file__).parent / "README.md"
LENGTHS, NUM_NEW = (12, 5, 9), 48


@pytest.fixture(scope="module")
def successors() -> type[Strategy]:
    """Return what the guide's only block of Python defines."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    defined: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, str(GUIDE), "exec"), defined)
    return defined["Successors"]


@pytest.fixture(scope="module")
def lm(tiny_llama_folder) -> LanguageModel:
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [request(rng.integers(2, 258, length).tolist(), NUM_NEW, one) for length, one in zip(LENGTHS, SAMPLINGS)]


@pytest.fixture(scope="module")
def plain(lm, requests) -> list[Row]:
    rows = run(lm, requests)
    assert min(least_margin(lm, *one) for one in zip(requests, [row.tokens for row in rows])) > LEAST_MARGIN
    return rows


def run_to_its_end(lm: LanguageModel, requests: list[Request], strategy: Strategy) -> tuple[RunningBatch, list[Any]]:
    """Decode requests, and return the batch and each one's output."""
    batch = RunningBatch(lm.programs, lm.params, lm.resolve(strategy), requests, (), lm.max_len)
    while not batch.done:
        batch.advance(32)
    return batch, batch.new_tokens()


@pytest.mark.exhaustive
def test_alone_and_in_a_sum_it_learns_the_same_table(lm, requests, plain, successors):
    """The other drafter is never right, so that the same nodes are verified, under other numbers."""
    texts = tuple((*asked.prompt, *row.tokens) for asked, row in zip(requests, plain))
    alone, tokens = run_to_its_end(lm, requests, successors())
    assert tokens == [row.tokens for row in plain]
    assert sum(alone.counts(row).accepted_by_depth[1] for row in range(len(LENGTHS))) > 0
    liar = Chain(texts, 3, lies_from=1)
    summed, tokens = run_to_its_end(lm, requests, SumOfDrafters((liar, successors()), nodes=64))
    assert tokens == [row.tokens for row in plain]
    learnt = np.asarray(alone._memory)
    assert len(np.unique(np.nonzero(learnt.any(axis=2))[1])) > 50
    np.testing.assert_array_equal(learnt, summed._memory.memories[1])


@pytest.mark.slow
def test_it_is_named_as_others_are_and_a_small_sum_changes_no_token(lm, requests, plain, successors, monkeypatch):
    named = MappingProxyType({**registry.STRATEGIES, "successors": successors})
    monkeypatch.setattr(registry, "STRATEGIES", named)
    strategy = parse_strategy("successors:tree=3.2.1+prompt_lookup:min_ngram=1+nodes=6")
    assert jaxinfer.strategies()["successors"]["options"] == {"tree": "4.2.1"}
    batch, tokens = run_to_its_end(lm, requests, strategy)
    assert tokens == [row.tokens for row in plain]
    # Drafts of its own are taken, and each part has to do without some of its nodes.
    assert np.asarray(batch._memory.chances[0].hits_BAM)[..., 1:].sum() > 0
    for chances, size in zip(batch._memory.chances, (16, 6)):
        tries_M = np.asarray(chances.tries_BAM).sum(axis=(0, 1))
        assert tries_M.shape == (size,)
        assert tries_M[1:].min() < tries_M[0]
