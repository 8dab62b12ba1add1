"""Texts of 200 tokens are those of plain decoding, whoever drafts them; perfect drafts are all taken.

Programs are compiled with few optimisations. The slow run writes shorter texts, with perfect drafts alone.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from tests.decoding.covered_models import (
    FABLES,
    LONG_LIMITS,
    SAMPLINGS,
    ask_clearly,
    cover_trained,
    damp_last_layer,
)
from tests.decoding.identity import (
    check_forced,
    check_identical,
    check_not_vacuous,
    check_screened,
    fewest_steps,
    forget_programs,
    run_forced,
)
from tests.decoding.strategy_cases import CASES, with_model
from tests.decoding.watched import run_watched
from tests.shared_data import shared_data
from tests.toys import encode_bytes

# Of what the daily runs ask for, which takes a fifth of the time of long texts.
LIMITS = (64, 40, 40, 40, 40)


@pytest.fixture(scope="module")
def covered(trained_folder):
    return cover_trained(trained_folder)


@pytest.fixture(scope="module")
def stories():
    """Return a real model that tells stories, and two of them."""
    lm = jaxinfer.load(shared_data("models/stories260K-hf"))
    prompts = [lm.tokenizer.encode(text) for text in ("Once upon a time, Tim", "The cat sat on the mat. The cat")]
    samplings = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=3))
    asked = ask_clearly(lm, prompts, (200, 200), samplings)
    check_screened(lm, asked)
    return lm, asked


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_stories_are_those_of_plain_decoding(stories, name):
    lm, asked = stories
    forget_programs(lm)
    strategy = CASES[name].strategy("stories", lm, asked.texts)
    check_not_vacuous(strategy, check_identical(lm, asked, strategy))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["whole", "stopped"])
def test_texts_of_the_trained_model_are_screened(covered, kind):
    asked = getattr(covered, kind)
    check_screened(covered.lm, asked)
    num_whole = sum(len(row.tokens) == limit for row, limit in zip(asked.oracle, LONG_LIMITS))
    assert num_whole == 5 if kind == "whole" else num_whole <= 2


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES])
def trained(request, covered):
    """Return a trained model with each strategy in turn, and the strategy's name."""
    return covered, request.param, CASES[request.param].strategy("trained", covered.lm, covered.whole.texts)


def test_long_texts_of_a_trained_model_are_those_of_plain_decoding(trained):
    """And one compilation serves them: step by step, in a second call, with other sampling and early ends."""
    one, _, strategy = trained
    forget_programs(one.lm)
    seen = check_identical(one.lm, one.whole, strategy, stride=1)
    assert seen["steps"] >= 50
    seen += check_identical(one.lm, one.stopped, strategy)
    check_not_vacuous(strategy, seen)
    assert one.lm.programs.compilations == 2


def test_a_text_that_sampling_forces_is_drafted_whole_or_never(trained):
    """Drafts that know the sampling parameters are all taken; heads that do not know them only cost steps."""
    one, name, strategy = trained
    (forced,) = encode_bytes("Z")
    if CASES[name].follows_sampling:
        check_forced(one.lm, one.whole, strategy, CASES[name].warm_up, forced)
    else:
        assert run_forced(one.lm, one.whole, strategy, forced).steps == [limit - 1 for limit in LONG_LIMITS]


@pytest.mark.slow
def test_a_perfect_draft_model_is_accepted_whole_and_its_opposite_never(trained_folder):
    lm = jaxinfer.load(trained_folder)
    whole = ask_clearly(lm, [encode_bytes(text) for text in FABLES], LIMITS, SAMPLINGS)
    strategy = CASES["draft_model"].strategy("trained", lm, whole.texts)
    # What the model finds likely, this drafter finds unlikely.
    negated = {**lm.params, "final_norm": jax.tree.map(jnp.negative, lm.params["final_norm"])}
    perfect, adversarial = (
        run_watched(lm, whole.requests, with_model(strategy, lm, weights)) for weights in (lm.params, negated)
    )
    assert perfect.tokens == adversarial.tokens == [row.tokens for row in whole.oracle]
    assert perfect.steps == fewest_steps(LIMITS, strategy.max_depth)
    assert adversarial.steps[0] == LIMITS[0] - 1


@pytest.mark.slow
def test_first_layers_that_decide_alone_are_accepted_whole(trained_folder):
    trained = jaxinfer.load(trained_folder)
    lm = LanguageModel(trained.config, damp_last_layer(trained.config, trained.params, 0.0), trained.backend)
    asked = ask_clearly(lm, [encode_bytes(text) for text in FABLES], LIMITS, SAMPLINGS)
    check_screened(lm, asked)
    strategy = CASES["layerskip"].strategy("trained", lm, asked.texts)
    found = run_watched(lm, asked.requests, strategy)
    assert found.tokens == [row.tokens for row in asked.oracle]
    assert found.steps == fewest_steps(LIMITS, strategy.max_depth)
