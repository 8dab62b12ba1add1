"""Every strategy on a mixture of experts in few bits writes what plain decoding on it writes, in every bit."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.models.layers import expert_stacks
from jaxinfer.ops.few_bits.formats import INT8, MXFP4, int4
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.decoding.covered_models import OTHER_SAMPLINGS, VOCAB_SIZE, random_model
from tests.decoding.rounded_models import check_texts
from tests.decoding.rows import Row, request, run
from tests.decoding.strategy_cases import CASES

FORMS = {"int4": int4(32, False), "mxfp4": MXFP4, "int8": INT8}
ONE = ("int4", "prompt_lookup")
REQUESTS = [
    request(np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist(), 20, sampling)
    for length, sampling in zip((12, 15), OTHER_SAMPLINGS)
]
Mixture = Callable[[str], tuple[LanguageModel, LanguageModel, list[Row]]]


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    """Return a function that makes a random mixture, the same in few bits, and texts of the latter, each alone."""
    plain = random_model("qwen3_moe")
    made: dict[str, tuple[LanguageModel, LanguageModel, list[Row]]] = {}

    def get(form: str) -> tuple[LanguageModel, LanguageModel, list[Row]]:
        if form not in made:
            lm = LanguageModel(plain.config, in_few_bits(plain.params, FORMS[form], form), plain.backend)
            assert all(map(is_quantized, expert_stacks(lm.params)))
            made[form] = plain, lm, [run(lm, [one])[0] for one in REQUESTS]
        return made[form]

    return get


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=pytest.mark.slow if (form, name) == ONE else pytest.mark.exhaustive)
        for form in FORMS
        for name in CASES
    ],
)
def test_texts_are_those_of_plain_decoding_on_the_same_weights(mixture, form, name):
    plain, lm, expected = mixture(form)
    check_texts("qwen3_moe", plain, lm, REQUESTS, expected, name)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("int4", marks=pytest.mark.slow),
        *(pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS if form != "int4"),
    ],
)
def test_logits_are_those_of_the_weights_that_codes_stand_for(mixture, form):
    """Where rows that are rounded to bfloat16 choose the same experts: nearly everywhere."""
    plain, lm, _ = mixture(form)
    params = jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, lm.params, is_leaf=is_quantized
    )
    ids = [list(REQUESTS[0].prompt)]
    found, same, before = (
        np.asarray(each.logits(ids))[0] for each in (lm, LanguageModel(plain.config, params, plain.backend), plain)
    )
    errors = np.abs(found - same).max(-1)
    assert np.median(errors) < 0.03 * same.std()
    assert np.median(np.abs(found - before).max(-1)) > 2 * np.median(errors)
