"""The strategy decides only the speed: every registered one writes what plain decoding writes with the same seed.

Strategies, families, ways of sampling, batch sizes and early ends are covered in pairs, by programs that are compiled
with few optimisations; the full product, of fully optimised ones, is marked exhaustive. Every case counts that it
drafted: tokens taken at depth 2, tokens refused, siblings that came second.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.registry import STRATEGIES
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import (
    LIMITS,
    MODELS,
    SAMPLINGS,
    Covered,
    ask,
    cover_random,
    random_model,
    random_prompts,
)
from tests.decoding.identity import (
    check_covered,
    check_identical,
    check_not_vacuous,
    check_screened,
    forget_programs,
)
from tests.decoding.strategy_cases import CASES

Cover = Callable[[str], Covered]


@pytest.fixture(scope="module")
def covered() -> Cover:
    """Return a function that makes each model, with its texts, once."""
    made: dict[str, Covered] = {}

    def get(name: str) -> Covered:
        if name not in made:
            made[name] = cover_random(name)
        return made[name]

    return get


def test_no_strategy_is_forgotten():
    """What is registered is tested here, or says itself that it is no way to get plain decoding's tokens."""
    promises = {name: kind().exactness for name, kind in STRATEGIES.items()}
    assert {name for name in CASES if "+" not in name} == {name for name in promises if promises[name] == "identical"}
    assert {name: promises[name] for name in promises if name not in CASES} == {"beam": "beam"}


@pytest.mark.parametrize("model", MODELS)
def test_texts_of_this_file_are_screened(covered, model):
    one = covered(model)
    for asked in (one.whole, one.stopped):
        check_screened(one.lm, asked)
    assert tuple(len(row.tokens) for row in one.whole.oracle) == LIMITS
    assert len({tuple(row.tokens) for row in one.whole.oracle}) == len(LIMITS)
    assert sum(len(row.tokens) < limit for row, limit in zip(one.stopped.oracle, LIMITS)) >= 3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_texts_of_every_family_are_those_of_plain_decoding(covered, name, model):
    one, alone = covered(model), (model == "gemma2") == (list(CASES).index(name) % 2 == 0)
    check_covered(one, CASES[name].strategy(1 + MODELS.index(model), one.lm, one.whole.texts), alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "index"), [(name, at) for name in CASES for at in range(len(CASES[name].specs))])
def test_all_texts_are_those_of_plain_decoding(covered, name, index, model, alone):
    one = covered(model)
    check_covered(one, CASES[name].strategy(index, one.lm, one.whole.texts), alone)


@pytest.fixture(scope="module")
def wide():
    """Return a model in 64 bits, whose texts need no screening."""
    with jax.enable_x64(True):
        narrow = random_model("gemma2")
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), narrow.params)
        lm = LanguageModel(narrow.config, params, choose_backend("float64", "cpu", scan_layers=False))
        return lm, ask(lm, random_prompts(), LIMITS, SAMPLINGS)


@pytest.mark.parametrize("name", CASES)
def test_texts_in_64_bits_are_those_of_plain_decoding(wide, name):
    lm, asked = wide
    forget_programs(lm)
    with jax.enable_x64(True):
        assert lm.params["embed"]["embedding"].dtype == jnp.float64
        strategy = CASES[name].strategy(0, lm, asked.texts)
        check_not_vacuous(strategy, check_identical(lm, asked, strategy))
