"""SparseGPT against a loop written out in NumPy, and what it is for: products and models that change less."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import InvalidOption
from jaxinfer.model_quantization import quantize
from jaxinfer.ops.few_bits.formats import TWO_OF_FOUR, blocks
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.sparsegpt import prune_by_sparsegpt
from tests.quantization.test_gptq import case
from tests.quantization.test_model import divergence
from tests.toys import fable_tokens

ASKED = {"num_texts": 6, "text_tokens": 48, "calibration": fable_tokens(100)[:2000]}


def on_host(array):
    return jax.tree.map(np.asarray, array).dequantize()


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


@pytest.mark.parametrize(
    "form", [TWO_OF_FOUR, pytest.param(blocks((1, 2)), marks=pytest.mark.slow)], ids=["2:4", "blocks"]
)
def test_columns_are_left_out_in_turn_and_the_others_make_up_for_it(form):
    """Over more than one block of columns; products then change far less than by the weights' sizes alone."""
    weights, inputs = case(0, width=192)
    squares = inputs.T @ inputs / len(inputs)
    found = on_host(prune_by_sparsegpt(weights, squares, form))
    expected = by_columns(weights, squares, form)
    # What is kept is rounded to bfloat16; where two weights cost nearly the same, another may be left out.
    is_near = np.abs(found - expected) < 0.02 * (1 + np.abs(expected))
    assert np.mean(is_near) > 0.97

    def error(pruned) -> float:
        return float(np.mean((inputs @ (pruned - weights).T) ** 2))

    assert error(found) < 0.5 * error(on_host(round_to_nearest(weights, form)))
    assert error(found) == pytest.approx(error(expected), rel=0.1)


@pytest.fixture(scope="module")
def toy(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("2:4", marks=pytest.mark.slow),
        pytest.param("blocks:kept=1/2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_pruned_on_texts_is_nearer_to_itself_than_with_its_largest_weights(toy, weights):
    """Half of each kernel is stored, and tables stay as they are."""
    texts, done = [fable_tokens(200)[3000:3064]], []
    chosen = quantize(toy, weights, method="sparsegpt", advance=done.append, **ASKED)
    largest = jaxinfer.load(toy.source.folder, weights=weights)
    assert done == [0, 1]
    assert 0 < divergence(toy, chosen, texts) < 0.9 * divergence(toy, largest, texts)
    assert chosen.params["embed"]["embedding"] is toy.params["embed"]["embedding"]
    kernel = chosen.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    assert float((on_host(kernel) != 0).mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("2:4", marks=pytest.mark.slow),
        pytest.param("blocks:kept=1/2", marks=pytest.mark.exhaustive),
    ],
)
def test_the_largest_weights_come_back_from_a_folder(toy, weights, tmp_path):
    """By ``magnitude``, which reads no text and is what loading does."""
    loaded = jaxinfer.load(toy.source.folder, weights=weights)
    found = quantize(toy, weights, method="magnitude")
    jax.tree.map(np.testing.assert_array_equal, found.params, loaded.params)
    again = jaxinfer.load(loaded.save(tmp_path / "saved"))
    assert again.fingerprint == loaded.fingerprint != toy.fingerprint
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


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
