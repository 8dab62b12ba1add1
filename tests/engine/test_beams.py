"""Beam searches in an engine: the texts and scores of a search in a batch, in every bit, under any load."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.beam.batch import BeamBatch
from jaxinfer.decoding.strategies.beam import BeamSearch
from jaxinfer.engine.beam_device import BeamDevice
from jaxinfer.errors import EngineError, InvalidOption, RequestCancelled, RequestTimedOut
from jaxinfer.models.config import LayerKind, Rope, RopeScaling
from tests.engine.harness import SMALL, Arrival, Harness
from tests.toys import TINY_LLAMA, float32_backend, random_params

SEARCH = BeamSearch(3, 0.5)
ENDS = (9,)
# A penalty, a bias, and ends that do not count: nothing that a search allows is the same for all.
SAMPLINGS = [
    SamplingParams(logprobs=True),
    SamplingParams(logprobs=True, repetition_penalty=1.3),
    SamplingParams(logprobs=True, ignore_eos=True),
    SamplingParams(logprobs=True, logit_bias={9: 3.0}),
]
# With rows for two searches. The longest alone may need 16 pages.
FEW = replace(SMALL, max_rows=7, pages=17)


class Text(NamedTuple):
    """A text that a search found."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float


class Searched:
    """A model, what is searched with it, and what each search finds in a batch of them."""

    def __init__(self, lm: LanguageModel, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self.lm = lm
        self.requests = [
            Request(list(prompt), len(prompt) + num_new, SAMPLINGS[at % len(SAMPLINGS)])
            for at, prompt in enumerate(prompts)
        ]
        texts = [replace(each, sample=sample) for each in self.requests for sample in range(SEARCH.width)]
        batch = BeamBatch(lm.programs, lm.params, SEARCH, texts, ENDS, lm.max_len)
        found = batch.new_tokens()
        while not batch.done:
            batch.advance(8)
            found = [old + new for old, new in zip(found, batch.new_tokens())]
        logprobs = [tuple(batch.log_probabilities(row, len(tokens))) for row, tokens in enumerate(found)]
        rows = [Text(tuple(tokens), logprobs[row], batch.score(row)) for row, tokens in enumerate(found)]
        self.expected = [rows[at : at + SEARCH.width] for at in range(0, len(rows), SEARCH.width)]
        assert any(text.tokens[-1] in ENDS for text in rows)


@pytest.fixture(scope="module")
def searched():
    config = replace(TINY_LLAMA, num_layers=1, max_position=72)
    text = np.random.default_rng(3).integers(10, 250, 60).tolist()
    prompts = [text[:21], text[:20], text[40:44], text[:33], text[5:21]]
    return Searched(LanguageModel(config, random_params(config), float32_backend()), prompts, 24)


@pytest.fixture(scope="module")
def harness(searched):
    return beam_harness(searched)


def beam_harness(searched, config=FEW) -> Harness:
    """Return an engine whose searches' scores are kept as they end, by the sequence's number."""
    made = Harness(searched.lm, SEARCH, config, ENDS)
    made.scores, finish = {}, made.core._finish

    def keep(sequence, row, now):
        made.scores[sequence.number] = row.state.ended.scores_BW[0].tolist()
        finish(sequence, row, now)

    made.core._finish = keep
    return made


def check(searched, harness, events, **options):
    """Serve searches and compare each with what it finds elsewhere; return their sequences."""
    harness.change(**options)
    arrivals = [Arrival(step, searched.requests[which], *rest) for step, which, *rest in events]
    served = harness.serve(arrivals)
    for (_, which, *_), arrival, sequence in zip(events, arrivals, served):
        handle = sequence.origin.request
        if arrival.cancelled_after is not None and sequence.number not in harness.scores:
            assert handle.done
            continue
        results = handle.results(0.0)
        found = [
            Text(result.tokens, result.logprobs, score)
            for result, score in zip(results, harness.scores[sequence.number], strict=True)
        ]
        assert found == searched.expected[which]
        assert len({result.stats.steps for result in results}) == 1
        assert results[0].stats.steps >= len(results[0].tokens) - 1
    return served


@pytest.mark.parametrize(
    "preemption",
    [pytest.param("recompute", marks=pytest.mark.slow), pytest.param("offload", marks=pytest.mark.exhaustive)],
)
def test_searches_that_make_room_go_on_where_they_were(searched, harness, preemption):
    """Their rows leave together, and share pages again when they come back."""
    before = harness.scheduler.preemptions, harness.restored
    events = [(0, which) for which in (3, 0, 1, 2, 4, 3)]
    served = check(searched, harness, events, preemption=preemption, prefix_cache="off")
    assert harness.scheduler.preemptions > before[0]
    assert (harness.restored > before[1]) == (preemption == "offload")
    # Nothing is searched twice.
    for sequence in served:
        assert sequence.origin.steps < 24


arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(0, 2), st.sampled_from([None, None, None, 0, 2, 9])),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
def test_load_changes_no_bit_of_a_search(searched, harness):
    seen = {"cancelled": 0, "cached": 0, "preempted": 0}

    @settings(derandomize=True, max_examples=40, deadline=None)
    @given(arrivals, st.sampled_from(["offload", "recompute"]), st.sampled_from(["exact", "exact", "off"]))
    def check_pattern(events, preemption, prefix_cache):
        served = check(searched, harness, events, preemption=preemption, prefix_cache=prefix_cache)
        seen["cancelled"] += sum(sequence.number not in harness.scores for sequence in served)
        seen["cached"] += sum(sequence.cached_tokens for sequence in served)
        seen["preempted"] += sum(sequence.preemptions for sequence in served)

    check_pattern()
    assert min(seen.values()) > 0


@pytest.mark.slow
def test_a_failing_device_lets_the_others_search_anew(searched, harness, monkeypatch):
    """The prompt that failed ends with an error; a search that ran begins again, and finds the same."""
    compute = BeamDevice.compute

    def fails_once(*arguments):
        monkeypatch.setattr(BeamDevice, "compute", compute)
        raise RuntimeError("out of memory")

    ran, failed = harness.submit(Arrival(0, searched.requests[0])), None
    while not harness.scheduler.is_idle:
        if failed is None and ran.origin.steps > 4:
            monkeypatch.setattr(BeamDevice, "compute", fails_once)
            failed = harness.submit(Arrival(0, searched.requests[2]))
        harness.core.step()
        harness.scheduler.check()
    with pytest.raises(EngineError, match="out of memory"):
        failed.origin.request.results(0.0)
    assert [result.tokens for result in ran.origin.request.results(0.0)] == [
        text.tokens for text in searched.expected[0]
    ]
    assert ran.origin.steps < 24


@pytest.mark.exhaustive
def test_a_search_across_a_change_of_rotation_is_what_it_is_alone():
    scaling = RopeScaling("longrope", 8.0, 32, short_factors=(1.0, 1.1, 1.3, 1.6), long_factors=(2.0, 5.0, 9.0, 20.0))
    config = replace(TINY_LLAMA, max_position=72, layer_pattern=(LayerKind(Rope(10000.0, 8, scaling)),))
    text = np.random.default_rng(3).integers(10, 250, 60).tolist()
    lm = LanguageModel(config, random_params(config), float32_backend())
    searched = Searched(lm, [text[:21], text[:20], text[:40], text[:30], text[:32]], 24)
    harness = beam_harness(searched, replace(FEW, pages=60))
    for preemption in ("offload", "recompute"):
        check(searched, harness, [(0, which) for which in range(5)], preemption=preemption)
    check(searched, beam_harness(searched), [(0, which) for which in (4, 3, 2, 1, 0)])


def test_fewer_rows_than_a_search_has_are_refused(searched):
    with pytest.raises(InvalidOption, match=r"^engine: max_rows=2 is less than the width=3 rows of a beam search$"):
        Harness(searched.lm, SEARCH, replace(FEW, max_rows=2))


@pytest.fixture(scope="module")
def lm(trained_folder):
    return jaxinfer.load(trained_folder, max_len=96)


@pytest.mark.exhaustive
def test_requests_for_searches_are_those_of_generate(lm):
    """Through the public engine: several results, a stream, a prefix, and requests that end early leave no page."""
    prompts, strategy = ["The quick fox followed", "One grey heron watched", "A small otter"], "beam:width=3"
    sampling = SamplingParams(n=2, logprobs=True)
    expected = lm.generate(prompts, max_new_tokens=24, sampling=sampling, strategy=strategy, batch_size=9)
    with lm.engine(strategy=strategy, max_rows=6, page_size=8, pages=60, prefill_chunk=16) as engine:
        requests = [engine.submit(prompt, max_new_tokens=24, sampling=sampling) for prompt in prompts]
        late = engine.submit(prompts[0], max_new_tokens=60, timeout=1e-4)
        left = engine.submit(prompts[1], max_new_tokens=60)
        left.cancel()
        found = [result for request in requests for result in request.results()]
        assert [(one.tokens, one.logprobs, one.text, one.sample) for one in found] == [
            (one.tokens, one.logprobs, one.text, one.sample) for one in expected
        ]
        with pytest.raises(RequestTimedOut):
            late.result()
        with pytest.raises(RequestCancelled):
            left.result()
        assert (engine.metrics().finished, engine.metrics().pages_in_use) == (6, 0)
        with engine.prefix(prompts[0][:17]):
            again = engine.submit(prompts[0], max_new_tokens=24, sampling=SamplingParams(logprobs=True))
            pieces = list(again)
            assert [piece.text for piece in pieces if piece.text] == [expected[0].text]
            assert pieces[-1].result.tokens == expected[0].tokens
            assert again.stats.cached_tokens > 0


@pytest.mark.exhaustive
def test_a_prompt_that_is_searched_again_is_not_computed_again(lm):
    options = {"max_new_tokens": 20, "sampling": SamplingParams(n=2, logprobs=True), "strategy": "beam:width=3"}
    prompt = "The quick fox followed " * 3
    expected = [(one.tokens, one.logprobs) for one in lm.generate(prompt, **options)]
    for _ in range(2):
        assert [(one.tokens, one.logprobs) for one in lm.generate(prompt, reuse=True, **options)] == expected
    assert lm._kept_pages.cached_tokens == 64
