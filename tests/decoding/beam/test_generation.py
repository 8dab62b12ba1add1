"""Beam search as people ask for it: results a prompt, batches, streams, and what is refused."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.beam.state import SearchRule, initial_beams
from jaxinfer.decoding.beam.step import extend
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.beam import BeamSearch
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from jaxinfer.sampling.arrays import sampling_arrays
from tests.toys import TINY_LLAMA, VOCAB_SIZE, float32_backend

PROMPTS = ["The quick fox followed", "One grey heron watched", "A small otter found the moon"]
SEARCH = BeamSearch(width=4, length_penalty=0.5, early_stopping=True)


@pytest.fixture(scope="module")
def lm(trained_folder) -> LanguageModel:
    return jaxinfer.load(trained_folder, max_len=96)


@pytest.fixture(scope="module")
def best(lm):
    """The three best texts of each prompt."""
    return lm.generate(PROMPTS, max_new_tokens=40, strategy=SEARCH, sampling=SamplingParams(n=3, logprobs=True))


def test_a_specification_names_every_option():
    found = parse_strategy("beam:width=4,length_penalty=0.5,early_stopping=true,n=3")
    assert found == BeamSearch(4, 0.5, True, 3)
    assert parse_strategy("beam:early_stopping=never").early_stopping == "never"
    assert parse_strategy("beam:early_stopping=false") == BeamSearch()
    assert jaxinfer.strategies()["beam"]["exactness"] == "beam"


@pytest.mark.slow
def test_a_prompt_gives_its_n_best_texts_in_order(lm, best):
    assert [(result.prompt, result.sample) for result in best] == [
        (text, rank) for text in PROMPTS for rank in (0, 1, 2)
    ]
    scores = [sum(result.logprobs) / len(result.tokens) ** 0.5 for result in best]
    for first in range(0, 9, 3):
        assert scores[first] > scores[first + 1] > scores[first + 2]
        assert len({result.text for result in best[first : first + 3]}) == 3
    for result in best:
        assert result.text
        assert result.text == lm.tokenizer.decode([token for token in result.tokens if token != 0])
        assert (result.finish_reason, result.tokens[-1]) == ("stop", 0)


@pytest.mark.slow
def test_the_best_text_is_more_probable_than_the_greedy_one(lm):
    sampling = SamplingParams(logprobs=True, ignore_eos=True)
    greedy = lm.generate(PROMPTS, max_new_tokens=40, sampling=sampling)
    beams = lm.generate(PROMPTS, max_new_tokens=40, sampling=sampling, strategy=SEARCH)
    gains = [sum(other.logprobs) - sum(result.logprobs) for result, other in zip(greedy, beams)]
    assert {result.finish_reason for result in beams} == {"length"}
    assert min(gains) > -1e-4
    assert max(gains) > 0.1


@pytest.mark.slow
def test_the_strategy_may_say_how_many_results_it_gives(lm, best):
    found = lm.generate(PROMPTS, max_new_tokens=40, strategy="beam:width=4,length_penalty=0.5,early_stopping=true,n=3")
    assert [result.tokens for result in found] == [result.tokens for result in best]
    stats = [result.stats for result in found]
    assert stats[0].steps == stats[1].steps == stats[0].target_passes
    assert stats[0].tokens_per_step == (len(found[0].tokens) - 1) / stats[0].steps
    assert (stats[0].drafted, stats[0].accepted_by_depth) == (0, ())


@pytest.mark.slow
def test_a_batch_holds_a_search_at_the_least(lm, best):
    """All results of a prompt come from one search, and all batches run the same programs."""
    compiled_before = lm.programs.compilations
    batches = list(
        lm.generate_batches(PROMPTS, max_new_tokens=40, strategy=SEARCH, sampling=SamplingParams(n=3), batch_size=2)
    )
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert [result.tokens for batch in batches for result in batch] == [result.tokens for result in best]
    assert lm.programs.compilations == compiled_before + 2


def test_prompts_may_ask_for_different_numbers_of_results(lm, best):
    numbers = [SamplingParams(n=1), SamplingParams(n=3), SamplingParams(n=2)]
    found = lm.generate(PROMPTS, max_new_tokens=40, strategy=SEARCH, sampling=numbers)
    assert [result.tokens for result in found] == [best[at].tokens for at in (0, 3, 4, 5, 6, 7)]


def test_a_stream_gives_the_whole_text_when_the_search_has_ended(lm, best):
    pieces = list(lm.stream(PROMPTS[0], max_new_tokens=40, strategy=SEARCH))
    assert [piece.text for piece in pieces if piece.text] == [best[0].text]
    assert [token for piece in pieces for token in piece.tokens] == list(best[0].tokens)
    assert pieces[-1].result is not None


@pytest.mark.slow
def test_one_beam_reports_the_log_probabilities_of_plain_decoding(lm):
    """To the bit, because they are of the same tokens after the same text."""
    sampling = SamplingParams(ignore_eos=True, logprobs=True)
    greedy = lm.generate(PROMPTS, max_new_tokens=20, sampling=sampling)
    beams = lm.generate(PROMPTS, max_new_tokens=20, sampling=sampling, strategy=BeamSearch(1))
    assert [result.tokens for result in beams] == [result.tokens for result in greedy]
    assert [result.logprobs for result in beams] == [result.logprobs for result in greedy]


@pytest.mark.slow
def test_as_many_beams_as_tokens_find_the_most_probable_pair_of_tokens(lm):
    """With nothing cut away after the first token, a search for two is exhaustive."""
    ids = lm.tokenizer.encode(PROMPTS[0])
    sampling = SamplingParams(ignore_eos=True, logprobs=True)
    (found,) = lm.generate([ids], max_new_tokens=2, strategy=BeamSearch(VOCAB_SIZE), sampling=sampling)
    logits_BTV = np.asarray(lm.logits([[*ids, token] for token in range(VOCAB_SIZE)]), np.float64)
    log_p_BTV = logits_BTV - np.logaddexp.reduce(logits_BTV, axis=-1, keepdims=True)
    first_V = log_p_BTV[0, len(ids) - 1]
    pairs_VV = first_V[:, None] + log_p_BTV[:, len(ids)]
    assert found.tokens == np.unravel_index(pairs_VV.argmax(), pairs_VV.shape)
    assert sum(found.logprobs) == pytest.approx(pairs_VV.max(), abs=1e-4)


REFUSED = {
    "no beam": ("beam:width=0", {}, "beam: width=0 is not a whole number"),
    "more beams than tokens": (
        f"beam:width={VOCAB_SIZE + 1}",
        {},
        f"width={VOCAB_SIZE + 1} is more than the {VOCAB_SIZE}",
    ),
    "half a beam": ("beam:width=2.5", {}, "option width of strategy beam needs a value of type int, got '2.5'"),
    "no result": ("beam:n=0", {}, "beam: n=0 is not a whole number"),
    "more results than beams": ("beam:width=2,n=3", {}, "beam: n=3 results are more than the width=2 texts"),
    "more samples than beams": ("beam:width=2", {"n": 3}, "beam: n=3 results are more than the width=2 texts"),
    "two numbers": ("beam:n=2", {"n": 3}, "n is 2 in the strategy and 3 in sampling"),
    "a rule unknown": ("beam:early_stopping=maybe", {}, "early_stopping of strategy beam is one of true, false, never"),
    "no number": ("beam:length_penalty=inf", {}, "beam: length_penalty=inf is not a number from -100 to 100"),
    "temperature": ("beam", {"temperature": 0.7}, "beam: temperature=0.7 is not 0: a search keeps the most probable"),
    "stop strings": ("beam", {"stop": ["."]}, "cannot look for stop strings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_search_cannot_do_is_refused_in_one_line(lm, name):
    strategy, sampling, pattern = REFUSED[name]
    with pytest.raises(InvalidOption, match=re.escape(pattern)) as caught:
        lm.generate(PROMPTS, strategy=strategy, sampling=SamplingParams(**sampling))
    assert "\n" not in str(caught.value)


@pytest.mark.optimised
def test_a_step_never_sorts_the_vocabulary():
    """On a CPU that would take longer than the model; the best of all candidates are found by partial selection."""
    width, vocab_size = 4, 4096
    sampling = sampling_arrays([SamplingParams()], [0], (2,), vocab_size)
    limits = np.array([100], np.int32)
    state = initial_beams([[5, 6]], limits, limits, width, 128, LayeredCache(()), sampling, jnp.float32)
    rule = SearchRule(jnp.float32(1), jnp.asarray(False), jnp.asarray(False))
    decoder = Decoder(replace(TINY_LLAMA, vocab_size=vocab_size), float32_backend())
    step = jax.jit(partial(extend, decoder, num_candidates=2 * width))
    text = step.lower(rule, state, jax.ShapeDtypeStruct((width, vocab_size), jnp.float32)).compile().as_text()
    sorts = [line for line in text.splitlines() if " sort(" in line]
    assert not [line for line in sorts if str(vocab_size) in line]
    assert 'custom_call_target="TopK"' in text
