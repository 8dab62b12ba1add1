"""The strategy decides only the speed: every registered one writes what plain decoding writes, in every bit.

Each strategy meets one family here, by name, with every way of sampling, early ends and forced texts in one compiled
program; the wide run has three kinds meet other dtypes; the full product, rows alone among it, of fully optimised
programs, is marked exhaustive. Every case counts that it drafted: tokens taken at depth 2, tokens refused, and siblings
that came second.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from jaxinfer.decoding.registry import STRATEGIES
from tests.decoding.covered_models import LIMITS, MODELS, Covered, cover_random
from tests.decoding.identity import check_covered, check_forced, check_screened
from tests.decoding.strategy_cases import CASES

Cover = Callable[..., Covered]

# The families that a strategy meets neither in every run nor on a mesh (`tests.parallel.on_devices.test_tokens`).
MEETINGS = [
    (name, model) for name, case in CASES.items() for model in MODELS if model not in (case.model, case.split.model)
]

# What each family's weights are in every run. Others are in the product.
DTYPES = {"gemma2": "bfloat16", "opt": "float16", "gpt2": "float32"}
OTHER_DTYPES = [
    pytest.param(name, model, dtype, marks=pytest.mark.exhaustive)
    for name in CASES
    for model in MODELS
    for dtype in ("float32", "bfloat16", "float16")
    if dtype != DTYPES[model]
]


@pytest.fixture(scope="module")
def covered() -> Cover:
    """Return a function that makes each model, with its texts, once."""
    made: dict[tuple[str, str], Covered] = {}

    def get(name: str, dtype: str | None = None) -> Covered:
        key = name, dtype or DTYPES[name]
        if key not in made:
            made[key] = cover_random(*key)
        return made[key]

    return get


def test_no_strategy_is_forgotten():
    """What is registered is tested here, or says itself that it is no way to get plain decoding's tokens."""
    promises = {name: kind().exactness for name, kind in STRATEGIES.items()}
    assert {name for name in CASES if "+" not in name} == {name for name in promises if promises[name] == "identical"}
    assert {name: promises[name] for name in promises if name not in CASES} == {"beam": "beam", "mcts": "search"}


def test_windows_caps_and_learned_positions_meet_several_strategies_in_every_run():
    met = Counter(case.model for case in CASES.values())
    assert set(met) == {"gemma2", "opt"}
    assert min(met.values()) >= 4


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("opt", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.exhaustive),
    ],
)
def test_texts_of_this_file_are_screened(covered, model):
    one = covered(model)
    for asked in (one.whole, one.stopped):
        check_screened(one.lm, asked)
    assert tuple(len(row.tokens) for row in one.whole.oracle) == LIMITS
    assert len({tuple(row.tokens) for row in one.whole.oracle}) == len(LIMITS)
    assert sum(len(row.tokens) < limit for row, limit in zip(one.stopped.oracle, LIMITS)) >= 3


# In CI `tests.decoding.strategies.test_sum_of_drafters` has a sum, and the strategies' own files hold these to
# plain decoding.
OTHER_RUNS = {
    "suffix": pytest.mark.slow,
    "mtp": pytest.mark.slow,
    "auto": pytest.mark.exhaustive,
    "cascade": pytest.mark.exhaustive,
    "dflash": pytest.mark.exhaustive,
    "streams+prompt_lookup": pytest.mark.exhaustive,
    "medusa+jacobi": pytest.mark.exhaustive,
    "triforce": pytest.mark.exhaustive,
    "draft_model+prompt_lookup": pytest.mark.exhaustive,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=OTHER_RUNS.get(name, ())) for name in CASES])
def test_texts_are_those_of_plain_decoding(covered, name):
    """To the end, up to early ends, and where sampling leaves no choice: by one compilation."""
    one = covered(CASES[name].model)
    strategy = CASES[name].strategy(CASES[name].model, one.lm, one.whole.texts)
    check_covered(one, strategy)
    if CASES[name].follows_sampling:
        check_forced(one.lm, one.whole, strategy, CASES[name].warm_up)
    assert one.lm.programs.compilations == 2


@pytest.mark.parametrize("name", [pytest.param("draft_model", marks=pytest.mark.exhaustive), "prompt_lookup"])
def test_texts_of_single_rows_are_those_of_plain_decoding(covered, name):
    """What a strategy does in one row may depend on the others of a batch, and may not show."""
    one = covered(CASES[name].model)
    check_covered(one, CASES[name].strategy("alone", one.lm, one.whole.texts), alone=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "model"), MEETINGS)
def test_texts_of_every_family_are_those_of_plain_decoding(covered, name, model):
    one = covered(model)
    check_covered(one, CASES[name].strategy(model, one.lm, one.whole.texts))


# Streams have adapters, which latent attention does not take.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if "streams" not in name])
def test_texts_of_latent_attention_are_those_of_plain_decoding(covered, name):
    one = covered("deepseek_v3", "float32")
    check_covered(one, CASES[name].strategy("deepseek_v3", one.lm, one.whole.texts))


@pytest.mark.parametrize(("name", "model", "dtype"), OTHER_DTYPES)
def test_texts_of_every_dtype_are_those_of_plain_decoding(covered, name, model, dtype):
    one = covered(model, dtype)
    check_covered(one, CASES[name].strategy(model, one.lm, one.whole.texts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "spec"), [(name, spec) for name, case in CASES.items() for spec in case.specs])
def test_all_texts_are_those_of_plain_decoding(covered, name, spec, model, alone):
    one = covered(model)
    check_covered(one, CASES[name].of(spec, one.lm, one.whole.texts), alone)
