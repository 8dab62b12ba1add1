"""Every strategy on a model in few bits writes what plain decoding on that model writes, in every bit."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import output_logits
from jaxinfer.models.layers import KERNEL
from jaxinfer.ops.cpu_kernels.panels.products import drafts_by_panels
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS, INT8, TWO_OF_FOUR, Format, int4
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from tests.decoding.covered_models import OTHER_SAMPLINGS, VOCAB_SIZE, random_model
from tests.decoding.rounded_models import check_texts
from tests.decoding.rows import Row, request, run
from tests.decoding.strategy_cases import CASES

FORMS = {"int4": int4(32, False), "int8": INT8, "Q8_0": GGUF_FORMATS["Q8_0"]}
FORMS |= {"2:4": TWO_OF_FOUR}
# Of models that round rows to bytes too.
FORMS |= {"int8, rows in int8": INT8, "int4, rows in int8": int4(32, False)}
LENGTHS = (33, 1, 17)
REQUESTS = [
    request(np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist(), 20, sampling)
    for length, sampling in zip(LENGTHS, OTHER_SAMPLINGS)
]
Quantized = Callable[[str], tuple[LanguageModel, list[Row]]]


def rounded(plain: LanguageModel, form: Format, activations: str | None = None) -> LanguageModel:
    """Return a model with kernels in a form and its table in int8."""

    def change(path, leaf):
        names = [key.key for key in path]
        if leaf.ndim != 2 or names[0] == "positions":
            return leaf
        return round_to_nearest(leaf, form if names[-1] == KERNEL else INT8)

    params = jax.tree_util.tree_map_with_path(change, plain.params)
    return LanguageModel(plain.config, params, replace(plain.backend, activations=activations))


@pytest.fixture(scope="module")
def plain() -> LanguageModel:
    return random_model("gpt2")


def in_form(plain: LanguageModel, name: str) -> LanguageModel:
    """Return a model with its weights in few bits."""
    lm = rounded(plain, FORMS[name], "int8" if "rows" in name else None)
    assert any(map(is_quantized, jax.tree.leaves(lm.params, is_leaf=is_quantized)))
    return lm


@pytest.fixture(scope="module")
def quantized(plain: LanguageModel) -> Quantized:
    """Return a function that makes the model with its weights in few bits, and its texts."""
    made: dict[str, tuple[LanguageModel, list[Row]]] = {}

    def get(name: str) -> tuple[LanguageModel, list[Row]]:
        if name not in made:
            lm = in_form(plain, name)
            made[name] = lm, [run(lm, [one])[0] for one in REQUESTS]
        return made[name]

    return get


def check(plain: LanguageModel, quantized: Quantized, form: str, name: str) -> None:
    lm, expected = quantized(form)
    check_texts("gpt2", plain, lm, REQUESTS, expected, name)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param("int4", "prompt_lookup", marks=pytest.mark.slow),
        pytest.param("int4", "medusa", marks=pytest.mark.exhaustive),
        pytest.param("2:4", "prompt_lookup", marks=pytest.mark.exhaustive),
    ],
)
def test_texts_are_those_of_plain_decoding_on_the_same_weights(plain, quantized, form, name):
    check(plain, quantized, form, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("int8, rows in int8", "prompt_lookup"),
        ("int4, rows in int8", "prompt_lookup"),
        ("int8, rows in int8", "layerskip"),
    ],
)
def test_texts_are_those_of_plain_decoding_where_rows_are_rounded_too(plain, quantized, form, name):
    check(plain, quantized, form, name)
    lm, _ = quantized(form)
    wide = LanguageModel(lm.config, lm.params, replace(lm.backend, activations=None))
    ids = [list(REQUESTS[0].prompt)]
    found, expected = (np.asarray(each.logits(ids)) for each in (lm, wide))
    # They are near those of rows as they are, and not the same.
    assert 1e-4 * expected.std() < np.abs(found - expected).max() < 0.2 * expected.std()


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_texts_of_every_strategy_are_those_of_plain_decoding(plain, quantized, name, form):
    check(plain, quantized, form, name)


@pytest.mark.parametrize(
    "is_rounded", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_a_model_drafts_for_itself_in_fewer_bits(plain, is_rounded):
    lm = in_form(plain, "int4") if is_rounded else plain
    strategy = lm.resolve("draft_model:model=self,num_draft_tokens=3")
    kernel = strategy.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.form == int4(32, False)
    # What is not rounded is not copied either.
    assert strategy.params["final_norm"]["scale"] is lm.params["final_norm"]["scale"]
    found, expected = run(lm, REQUESTS, strategy), [run(lm, [one])[0] for one in REQUESTS]
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    counts = [row.counts for row in found]
    share = sum(each.accepted for each in counts) / sum(each.drafted for each in counts)
    # A model that is in these bits already drafts with its own weights.
    assert 0.5 < share <= 1 if is_rounded else 0.5 < share < 1


def test_what_a_model_cannot_draft_in_is_refused(plain, tiny_llama_folder):
    refused = {"int9": "unknown weights", "gguf": "gguf is no form to round", "nf4:group=128": "groups of 128"}
    for weights, message in refused.items():
        with pytest.raises(InvalidOption, match=message):
            plain.resolve(f"draft_model:model=self,weights={weights}")
    with pytest.raises(InvalidOption, match="is no GGUF file; use int8 or int4"):
        plain.resolve(f"draft_model:model={tiny_llama_folder(vocab_size=VOCAB_SIZE)},weights=gguf")


def test_the_output_matrix_multiplies_rows_as_they_are(plain):
    lm = in_form(plain, "int8, rows in int8")
    decoder = lm.programs.decoder
    assert decoder.backend.activations == "int8"
    hidden_BD = jax.random.normal(jax.random.key(0), (3, lm.config.model_dim))
    found, expected = (
        jax.jit(lambda hidden_BD, d=each: output_logits(d, lm.params, hidden_BD))(hidden_BD)
        for each in (decoder, replace(decoder, backend=replace(decoder.backend, activations=None)))
    )
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_a_draft_model_is_loaded_in_few_bits(plain, tiny_llama_folder):
    strategy = plain.resolve(f"draft_model:model={tiny_llama_folder(vocab_size=VOCAB_SIZE)},weights=int8")
    kernel = strategy.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.form == INT8
    # It only drafts.
    assert (isinstance(kernel, PanelArray) and kernel.drafts) == drafts_by_panels(INT8, kernel.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8"])
def test_logits_are_those_of_the_weights_that_codes_stand_for(plain, quantized, form):
    """Up to rows that are rounded to bfloat16; the same weights, rounded, are far from those they were made of."""
    lm, _ = quantized(form)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(jax.tree.map(np.asarray, leaf).dequantize()) if is_quantized(leaf) else leaf,
        lm.params,
        is_leaf=is_quantized,
    )
    ids = [list(REQUESTS[0].prompt)]
    found, same, before = (
        np.asarray(each.logits(ids)) for each in (lm, LanguageModel(plain.config, params, plain.backend), plain)
    )
    assert np.abs(found - same).max() < 0.03 * same.std()
    assert np.abs(found - before).max() > np.abs(found - same).max()
