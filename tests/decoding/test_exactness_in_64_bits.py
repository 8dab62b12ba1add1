"""In 64 bits, too, a strategy writes what plain decoding writes, and there is no text that was nearly another."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LanguageModel
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import LIMITS, SAMPLINGS, ask, random_model, random_prompts
from tests.decoding.identity import check_identical, check_not_vacuous, forget_programs
from tests.decoding.strategy_cases import CASES

IN_EVERY_RUN = ("prompt_lookup",)


@pytest.fixture(scope="module")
def wide():
    """Return a model in 64 bits, whose texts need no screening."""
    with jax.enable_x64(True):
        narrow = random_model("gemma2")
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), narrow.params)
        lm = LanguageModel(narrow.config, params, choose_backend("float64", "cpu", scan_layers=False))
        return lm, ask(lm, random_prompts(), LIMITS, SAMPLINGS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in CASES],
)
def test_texts_in_64_bits_are_those_of_plain_decoding(wide, name):
    lm, asked = wide
    forget_programs(lm)
    with jax.enable_x64(True):
        assert lm.params["embed"]["embedding"].dtype == jnp.float64
        strategy = CASES[name].strategy("float64", lm, asked.texts)
        check_not_vacuous(strategy, check_identical(lm, asked, strategy))
