"""The strategy decides only the speed: every registered one writes what plain decoding writes with the same seed.

Strategies, families, ways of sampling, batch sizes and early ends are covered in pairs, by programs that are compiled
with few optimisations; the full product, of fully optimised ones, is marked exhaustive. Every case counts that it
drafted: tokens taken at depth 2, tokens refused, siblings that came second.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams, Strategy
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.registry import STRATEGIES
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import (
    ALONE,
    LIMITS,
    LONG_LIMITS,
    MODELS,
    SAMPLINGS,
    Asked,
    Covered,
    ask,
    damp_last_layer,
    least_margin,
    make_models,
    quick_compilation,
    random_model,
    random_prompts,
)
from tests.decoding.rows import LEAST_MARGIN
from tests.decoding.strategy_cases import CASES, with_model
from tests.decoding.watched import run_watched
from tests.shared_data import shared_data
from tests.toys import encode_bytes

Cover = Callable[[str], Covered]


@pytest.fixture(scope="module")
def covered(trained_folder) -> Cover:
    """Return a function that makes each model, with its texts, once."""
    makers, made = make_models(trained_folder), {}

    def get(name: str) -> Covered:
        if name not in made:
            with quick_compilation():
                made[name] = makers[name]()
        return made[name]

    return get


def test_no_strategy_is_forgotten():
    """What is registered is tested here, or says itself that it is no way to get plain decoding's tokens."""
    promises = {name: kind().exactness for name, kind in STRATEGIES.items()}
    assert {name for name in CASES if "+" not in name} == {name for name in promises if promises[name] == "identical"}
    assert {name: promises[name] for name in promises if name not in CASES} == {"beam": "beam"}


def check_screened(lm: LanguageModel, asked: Asked) -> None:
    assert least_margin(lm, asked) > LEAST_MARGIN


@pytest.mark.parametrize("model", MODELS)
def test_texts_of_this_file_are_screened(covered, model):
    one = covered(model)
    for asked in (one.whole, one.stopped):
        check_screened(one.lm, asked)
    limits = LONG_LIMITS if model == "llama" else LIMITS
    assert tuple(len(row.tokens) for row in one.whole.oracle) == limits
    assert len({tuple(row.tokens) for row in one.whole.oracle}) == len(limits)
    assert sum(len(row.tokens) < limit for row, limit in zip(one.stopped.oracle, limits)) >= 3


def check_identical(
    lm: LanguageModel, asked: Asked, strategy: Strategy, alone: bool = False, stride: int = 32
) -> Counter[str]:
    """Check all rows as one batch, or some of them each alone, and return what was seen."""
    seen: Counter[str] = Counter()
    for rows in [[row] for row in ALONE] if alone else [list(range(len(asked.requests)))]:
        found = run_watched(lm, [asked.requests[row] for row in rows], strategy, asked.eos_token_ids, stride)
        assert found.tokens == [asked.oracle[row].tokens for row in rows]
        seen += Counter({**found.seen, "steps": max(found.steps)})
    return seen


def check_not_vacuous(strategy: Strategy, seen: Counter[str]) -> None:
    if strategy.max_depth:
        assert seen["deep"] > 0
        assert seen["refused"] > 0
    assert strategy.branches or not seen["branched"]
    assert (seen["later"] > 0) == (seen["branched"] > 0)


def forget_programs(lm: LanguageModel) -> None:
    """Free compiled programs: those of all cases together map more memory regions than a process may have."""
    lm.programs = Programs(lm.programs.decoder)


def check_covered(one: Covered, strategy: Strategy, alone: bool = False) -> None:
    forget_programs(one.lm)
    seen = sum((check_identical(one.lm, asked, strategy, alone) for asked in (one.whole, one.stopped)), Counter())
    check_not_vacuous(strategy, seen)
    assert one.lm.programs.compilations == 2


@pytest.mark.parametrize("model", MODELS[1:])
@pytest.mark.parametrize("name", CASES)
def test_texts_of_every_family_are_those_of_plain_decoding(covered, name, model):
    one, alone = covered(model), (model == "gemma2") == (list(CASES).index(name) % 2 == 0)
    with quick_compilation():
        check_covered(one, CASES[name].strategy(MODELS.index(model), one.lm, one.whole.texts), alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("model", MODELS[1:])
@pytest.mark.parametrize(("name", "index"), [(name, at) for name in CASES for at in range(len(CASES[name].specs))])
def test_all_texts_are_those_of_plain_decoding(covered, name, index, model, alone):
    one = covered(model)
    check_covered(one, CASES[name].strategy(index, one.lm, one.whole.texts), alone)


@contextmanager
def in_64_bits() -> Iterator[None]:
    with jax.enable_x64(True), quick_compilation():
        yield


@pytest.fixture(scope="module")
def wide():
    """Return a model in 64 bits, whose texts need no screening."""
    with in_64_bits():
        narrow = random_model("gemma2")
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), narrow.params)
        lm = LanguageModel(narrow.config, params, choose_backend("float64", "cpu", scan_layers=False))
        return lm, ask(lm, random_prompts(), LIMITS, SAMPLINGS)


@pytest.mark.parametrize("name", CASES)
def test_texts_in_64_bits_are_those_of_plain_decoding(wide, name):
    lm, asked = wide
    forget_programs(lm)
    with in_64_bits():
        assert lm.params["embed"]["embedding"].dtype == jnp.float64
        strategy = CASES[name].strategy(0, lm, asked.texts)
        check_not_vacuous(strategy, check_identical(lm, asked, strategy))


@pytest.fixture(scope="module")
def stories():
    """Return a real model that tells stories, and two of them."""
    lm = jaxinfer.load(shared_data("models/stories260K-hf"))
    prompts = [lm.tokenizer.encode(text) for text in ("Once upon a time, Tim", "The cat sat on the mat. The cat")]
    samplings = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=3))
    with quick_compilation():
        asked = ask(lm, prompts, (200, 200), samplings)
        check_screened(lm, asked)
    return lm, asked


@pytest.mark.parametrize("name", CASES)
def test_stories_are_those_of_plain_decoding(stories, name):
    lm, asked = stories
    forget_programs(lm)
    with quick_compilation():
        strategy = CASES[name].strategy(0, lm, asked.texts)
        check_not_vacuous(strategy, check_identical(lm, asked, strategy))


@pytest.fixture(scope="module", params=CASES)
def trained(request, covered):
    """Return a trained model with each strategy in turn, and the strategy's name."""
    one, name = covered("llama"), request.param
    with quick_compilation():
        return one, name, CASES[name].strategy(0, one.lm, one.whole.texts)


def test_long_texts_of_a_trained_model_are_those_of_plain_decoding(trained):
    """And one compilation serves them: step by step, in a second call, with other sampling and early ends."""
    one, _, strategy = trained
    forget_programs(one.lm)
    with quick_compilation():
        seen = check_identical(one.lm, one.whole, strategy, stride=1)
        assert seen["steps"] >= 50
        seen += check_identical(one.lm, one.stopped, strategy)
    check_not_vacuous(strategy, seen)
    assert one.lm.programs.compilations == 2


def fewest_steps(limits: Sequence[int], depth: int) -> list[int]:
    """Count steps of ``depth`` + 1 tokens after the first token, which prefill draws."""
    return [-(-(limit - 1) // (depth + 1)) for limit in limits]


def test_a_text_that_sampling_forces_is_drafted_whole_or_never(trained):
    """Drafts that know the sampling parameters are all taken; heads that do not know them only cost steps."""
    one, name, strategy = trained
    (forced,) = encode_bytes("Z")
    samplings = [SamplingParams(temperature=0.7 * (row % 3), logit_bias={forced: 1000.0}, seed=row) for row in range(5)]
    requests = [replace(asked, sampling=sampling) for asked, sampling in zip(one.whole.requests, samplings)]
    with quick_compilation():
        found = run_watched(one.lm, requests, strategy)
    assert found.tokens == [[forced] * limit for limit in LONG_LIMITS]
    if CASES[name].follows_sampling:
        most = [steps + CASES[name].warm_up for steps in fewest_steps(LONG_LIMITS, strategy.max_depth)]
        assert all(steps <= enough for steps, enough in zip(found.steps, most))
    else:
        assert found.steps == [limit - 1 for limit in LONG_LIMITS]


def test_a_perfect_draft_model_is_accepted_whole_and_its_opposite_never(covered):
    one = covered("llama")
    lm, tokens = one.lm, [row.tokens for row in one.whole.oracle]
    strategy = CASES["draft_model"].strategy(0, lm, one.whole.texts)
    # What the model finds likely, this drafter finds unlikely.
    negated = {**lm.params, "final_norm": jax.tree.map(jnp.negative, lm.params["final_norm"])}
    with quick_compilation():
        perfect, adversarial = (
            run_watched(lm, one.whole.requests, with_model(strategy, lm, weights)) for weights in (lm.params, negated)
        )
    assert perfect.tokens == adversarial.tokens == tokens
    assert perfect.steps == fewest_steps(LONG_LIMITS, strategy.max_depth)
    assert adversarial.steps[0] == LONG_LIMITS[0] - 1


def test_first_layers_that_decide_alone_are_accepted_whole(covered):
    one = covered("llama")
    lm = LanguageModel(one.lm.config, damp_last_layer(one.lm.config, one.lm.params, 0.0), one.lm.backend)
    with quick_compilation():
        asked = ask(lm, [row.prompt for row in one.whole.requests], LONG_LIMITS, SAMPLINGS)
        check_screened(lm, asked)
        strategy = CASES["layerskip"].strategy(0, lm, asked.texts)
        found = run_watched(lm, asked.requests, strategy)
    assert found.tokens == [row.tokens for row in asked.oracle]
    assert found.steps == fewest_steps(LONG_LIMITS, strategy.max_depth)
