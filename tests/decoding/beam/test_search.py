"""Beam search finds the texts and scores of transformers' beam search, whatever the options, batch and model."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.strategies.beam import BeamSearch
from tests.decoding.beam.beams import Text, search, search_with_transformers
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, request, run
from tests.late_imports import late
from tests.models.hugging_face import build_model, save_model
from tests.models.variants import VARIANTS

late("torch")
late("transformers")
pytestmark = pytest.mark.parity

NUM_NEW = 20
PROMPTS = [np.random.default_rng(length).integers(2, 96, length).tolist() for length in (40, 17, 5)]
PENALTIES, EARLY = (-1.0, 0.0, 1.0, 2.0), (True, False, "never")
FEW_RULES = [*((penalty, False) for penalty in PENALTIES), (1.0, True), (1.0, "never")]


class Case(NamedTuple):
    """A model of both libraries, and what ends its texts early, so that a search's texts differ in length."""

    model: Any
    lm: LanguageModel
    ends: tuple[int, ...]


# Tokens that occur in the models' most probable texts, and one (7) that does not and only adds candidates.
ENDS: Mapping[str, tuple[int, ...]] = {"mha": (24, 46), "mistral-window": (46, 12, 7)}
SEARCHES = [
    ("mha", 3, FEW_RULES),
    pytest.param("mha", 3, list(product(PENALTIES, EARLY)), marks=pytest.mark.exhaustive),
    pytest.param("mistral-window", 4, FEW_RULES, marks=pytest.mark.exhaustive),
]


def make_case(name: str, folder: Any, ends: Sequence[int] = ()) -> Case:
    model = build_model(VARIANTS[name])
    model.generation_config.eos_token_id = None
    return Case(model, jaxinfer.load(save_model(model, folder, VARIANTS[name])), tuple(ends))


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Callable[[str], Case]:
    """Return a function that makes each model once."""
    return cache(lambda name: make_case(name, tmp_path_factory.mktemp("model"), ENDS[name]))


@pytest.fixture(scope="module")
def llama(cases) -> Case:
    return cases("mha")


def check_equal(found: Sequence[Text], expected: Sequence[Text]) -> None:
    assert [text.tokens for text in found] == [text.tokens for text in expected]
    np.testing.assert_allclose([text.score for text in found], [text.score for text in expected], rtol=1e-5)


def check_case(
    case: Case, strategy: BeamSearch, sampling: SamplingParams | None = None, **options: Any
) -> list[list[list[int]]]:
    """Compare a ragged batch with single searches of transformers; return all texts of each prompt."""
    found, _ = search(case.lm, PROMPTS, strategy, NUM_NEW, case.ends, sampling)
    for prompt, texts in zip(PROMPTS, found):
        expected = search_with_transformers(case.model, prompt, strategy, NUM_NEW, case.ends, **options)
        assert expected.margin > LEAST_MARGIN
        check_equal(texts, expected.texts)
    return [[text.tokens for text in texts] for texts in found]


@pytest.mark.parametrize(("name", "width", "rules"), SEARCHES)
def test_all_texts_and_scores_of_a_ragged_batch_equal_those_of_transformers(cases, name, width, rules):
    """Under every rule; the rules matter, texts of a search differ in length, and changing rules compiles nothing."""
    case = cases(name)
    compiled_before = case.lm.programs.compilations
    found = {rule: check_case(case, BeamSearch(width, *rule)) for rule in rules}
    lengths = {len(text) for searches in found.values() for texts in searches for text in texts}
    assert len(lengths) > 8
    assert max(lengths) == NUM_NEW
    assert any(len({len(text) for text in texts}) > 2 for texts in found[0.0, False])
    assert len({str(found[penalty, False]) for penalty in PENALTIES}) > 1
    assert len({str(found[1.0, early]) for early in EARLY}) == 3
    assert case.lm.programs.compilations <= compiled_before + 2


@pytest.mark.slow
def test_a_row_of_a_batch_never_sees_another(llama):
    together, batch = search(llama.lm, PROMPTS, BeamSearch(3), NUM_NEW, llama.ends)
    for row, prompt in enumerate(PROMPTS):
        (alone,), single = search(llama.lm, [prompt], BeamSearch(3), NUM_NEW, llama.ends)
        check_equal(together[row], alone)
        assert batch.counts(3 * row) == single.counts(0)


def test_counters_and_log_probabilities_describe_the_texts(llama):
    """Every step reads the target once; the log-probabilities of a text add up to what its score was made of."""
    found, batch = search(llama.lm, PROMPTS, BeamSearch(3, 2.0, True), NUM_NEW, llama.ends)
    for row, text in enumerate(text for texts in found for text in texts):
        counts = batch.counts(row)
        assert counts.new_tokens == len(text.tokens)
        assert counts.steps == counts.target_passes >= max(len(other.tokens) for other in found[row // 3]) - 1
        logprobs = batch.log_probabilities(row, len(text.tokens))
        assert len(logprobs) == len(text.tokens)
        assert sum(logprobs) / len(text.tokens) ** 2 == pytest.approx(text.score, abs=1e-4)
    assert any(batch.counts(row).steps < NUM_NEW - 1 for row in range(9))


@pytest.mark.parametrize("sampling", [one for one in SAMPLINGS if one.temperature == 0], ids=["plain", "edited"])
@pytest.mark.parametrize(
    "early_stopping", [pytest.param(True, marks=pytest.mark.slow), pytest.param("never", marks=pytest.mark.exhaustive)]
)
def test_one_beam_is_greedy_search(llama, sampling, early_stopping):
    """With penalties and bias too, and to the first stop token whatever the rule of the search is."""
    strategy = BeamSearch(1, 2.0, early_stopping)
    expected = run(llama.lm, [request(prompt, NUM_NEW, sampling) for prompt in PROMPTS], eos_token_ids=llama.ends)
    found, batch = search(llama.lm, PROMPTS, strategy, NUM_NEW, llama.ends, sampling)
    assert [text.tokens for (text,) in found] == [row.tokens for row in expected]
    assert [batch.counts(row).steps for row in range(3)] == [row.counts.steps for row in expected]
    for row, other in enumerate(expected):
        assert batch.log_probabilities(row, NUM_NEW)[: len(other.tokens)] == pytest.approx(other.logprobs, abs=1e-4)


EDITS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "minimum": ({"min_new_tokens": 9}, {"min_new_tokens": 9}),
    "all": (
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "logit_bias": {24: 2.0, 46: 1.0, 30: -4.0}},
        {"repetition_penalty": 1.3, "min_new_tokens": 4, "sequence_bias": [[[24], 2.0], [[46], 1.0], [[30], -4.0]]},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in EDITS if name != "all"] + ["all"]
)
def test_penalties_bias_and_minimum_change_log_probabilities_as_transformers_does(llama, name):
    params, options = EDITS[name]
    strategy = BeamSearch(3, 0.0, True)
    texts = check_case(llama, strategy, SamplingParams(**params), **options)
    plain, _ = search(llama.lm, PROMPTS, strategy, NUM_NEW, llama.ends)
    assert texts != [[text.tokens for text in found] for found in plain]
    least = min(len(text) for found in texts for text in found)
    assert params.get("min_new_tokens", 0) < least < NUM_NEW


@pytest.mark.slow
def test_learned_positions_and_a_penalty_that_counts_each_text_alone(tmp_path):
    """GPT-2; without the penalty its texts are few tokens over and over."""
    case = make_case("gpt2-n_inner-untied-scales", tmp_path, (36,))
    texts = check_case(case, BeamSearch(4), SamplingParams(repetition_penalty=5.0), repetition_penalty=5.0)
    assert len({token for found in texts for text in found for token in text}) > 20


@pytest.mark.slow
def test_texts_that_grow_past_the_original_length_of_longrope_go_on_from_a_new_cache(tmp_path):
    """Two of the prompts cross it, at different steps, which transformers handles by a new cache as well."""
    case = make_case("phi3-gqa-tied-longrope-partial", tmp_path)
    assert [len(prompt) + NUM_NEW > 42 for prompt in PROMPTS] == [True, False, False]
    prompts = [PROMPTS[0], [*PROMPTS[1], *PROMPTS[1]], PROMPTS[2]]
    found, _ = search(case.lm, prompts, BeamSearch(3), NUM_NEW)
    for prompt, texts in zip(prompts, found):
        expected = search_with_transformers(case.model, prompt, BeamSearch(3), NUM_NEW, ())
        assert expected.margin > LEAST_MARGIN
        check_equal(texts, expected.texts)
    assert case.lm.programs.compilations == 3
