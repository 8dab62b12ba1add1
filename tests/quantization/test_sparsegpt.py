"""SparseGPT against a loop written out in NumPy, and what it is for: products and models that change less."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.errors import InvalidOption
from jaxinfer.model_quantization import quantize
from jaxinfer.ops.few_bits.formats import TWO_OF_FOUR, blocks
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.sparsegpt import prune_by_sparsegpt
from tests.quantization.test_gptq import case
from tests.quantization.test_model import divergence
from tests.toys import fable_tokens

FORMS = {"2:4": TWO_OF_FOUR, "blocks": blocks((1, 2))}
ASKED = {"num_texts": 6, "text_tokens": 48, "calibration": fable_tokens(100)[:2000]}


def by_columns(weights, squares, form):
    """Leave out column after column and pass each error on to all columns after it at once."""
    weights, squares = weights.astype(np.float64), squares.astype(np.float64)
    width, dead = weights.shape[1], np.diag(squares) == 0
    weights[:, dead] = 0
    inverse = np.linalg.inv(squares + np.diag(dead + 0.01 * np.mean(np.diag(squares))))
    passed = np.linalg.cholesky(inverse).T
    is_kept, result = np.zeros(weights.shape, bool), np.zeros_like(weights)
    if form.block > 1:
        starts = range(0, width, form.block)
        parts = [
            (weights[:, at : at + form.block], inverse[at : at + form.block, at : at + form.block]) for at in starts
        ]
        costs = np.stack([np.einsum("ni,ij,nj->n", part, np.linalg.inv(own), part) for part, own in parts], axis=1)
        is_kept = np.repeat(np.argsort(np.argsort(-costs, axis=1), axis=1) < len(parts) // 2, form.block, axis=1)
    for column in range(width):
        if form.block == 1 and column % 4 == 0:
            scores = (weights[:, column : column + 4] / np.diag(passed)[column : column + 4]) ** 2
            is_kept[:, column : column + 4] = np.argsort(np.argsort(-scores, axis=1), axis=1) < 2
        result[:, column] = np.where(is_kept[:, column], weights[:, column], 0)
        error = (weights[:, column] - result[:, column]) / passed[column, column]
        weights[:, column:] -= error[:, None] * passed[column, column:]
    return result


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_columns_are_left_out_in_turn_and_the_others_make_up_for_it(form):
    """Over more than one block of columns; products then change far less than by the weights' sizes alone."""
    weights, inputs = case(0, width=192)
    squares = inputs.T @ inputs / len(inputs)
    found = np.asarray(prune_by_sparsegpt(weights, squares, form).dequantize())
    expected = by_columns(weights, squares, form)
    # What is kept is rounded to bfloat16; where two weights cost nearly the same, another may be left out.
    is_near = np.abs(found - expected) < 0.02 * (1 + np.abs(expected))
    assert np.mean(is_near) > 0.97

    def error(pruned) -> float:
        return float(np.mean((inputs @ (pruned - weights).T) ** 2))

    assert error(found) < 0.5 * error(np.asarray(round_to_nearest(weights, form).dequantize()))
    assert error(found) == pytest.approx(error(expected), rel=0.1)


@pytest.fixture(scope="module")
def toy(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.mark.parametrize("weights", ["2:4", pytest.param("blocks:kept=1/2", marks=pytest.mark.slow)])
def test_a_sparse_model_is_nearer_to_itself_and_comes_back_from_its_folder(toy, weights, tmp_path):
    """Than with its largest weights; tables stay as they are, and every strategy writes plain decoding's texts."""
    texts, done = [fable_tokens(200)[3000:3064]], []
    chosen = quantize(toy, weights, method="sparsegpt", advance=done.append, **ASKED)
    largest = jaxinfer.load(toy._checkpoint.folder, weights=weights)
    assert done == [0, 1]
    assert 0 < divergence(toy, chosen, texts) < 0.9 * divergence(toy, largest, texts)
    assert chosen.params["embed"]["embedding"] is toy.params["embed"]["embedding"]
    kernel = chosen.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    assert is_quantized(kernel)
    assert float((np.asarray(kernel.dequantize()) != 0).mean()) == pytest.approx(0.5, abs=0.01)
    again = jaxinfer.load(chosen.save(tmp_path / "saved"))
    assert again.fingerprint == chosen.fingerprint
    jax.tree.map(np.testing.assert_array_equal, again.params, chosen.params)
    asked = {"max_new_tokens": 8, "sampling": SamplingParams(temperature=1.3, top_p=0.5, seed=3, logprobs=True)}
    plain, drafted = (again.generate([texts[0][:20], texts[0][:7]], strategy=name, **asked)
                      for name in ("autoregressive", "prompt_lookup"))  # fmt: skip
    assert [(one.tokens, one.logprobs) for one in plain] == [(one.tokens, one.logprobs) for one in drafted]


def test_magnitude_reads_no_text_and_is_what_load_does(toy):
    found = quantize(toy, "2:4", method="magnitude")
    loaded = jaxinfer.load(toy._checkpoint.folder, weights="2:4")
    jax.tree.map(np.testing.assert_array_equal, found.params, loaded.params)


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ("2:4", {"method": "gptq"}, "'2:4': gptq does not choose these: use sparsegpt or magnitude"),
        ("int4:group=32", {"method": "sparsegpt"}, "sparsegpt does not choose these: use gptq or awq, or sparse"),
        ("2:8", {}, "unknown weights '2:8'; use one of int8, int4, nf4, mxfp4, fp8, 2:4, blocks, gguf"),
        ("2:4:only=experts", {}, "leave only= out"),
        ("2:4:kept=1/2", {}, "unknown weights '2:4:kept=1/2'"),
        ("blocks:kept=1/3", {}, "kept='1/3' is none of 1/4, 1/2, 2/3, 3/4"),
        ("blocks:kept=3/4", {}, "do not divide into groups of 128; use another share of blocks, or 2:4"),
        ("2:4", {"activations": "int8"}, "no products with weights '2:4'"),
    ],
)
def test_mistakes_are_told(toy, weights, changes, message):
    with pytest.raises(InvalidOption, match=message):
        quantize(toy, weights, **{**ASKED, "method": "sparsegpt", **changes})
