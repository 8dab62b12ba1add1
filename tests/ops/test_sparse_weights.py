"""Sparse weights: the largest are kept, stand where they stood, and are multiplied as they are stored, row by row."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.few_bits.products import multiply_few_bits
from jaxinfer.ops.cpu_kernels.few_bits.sparse_code import sparse_module
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.few_bits.formats import SHARES, TWO_OF_FOUR, blocks, format_from
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.few_bits.sparse import are_places
from jaxinfer.ops.few_bits.split import check_split, take_quantized
from jaxinfer.ops.matmul import linears
from tests.ops.foreign_calls import HOST, SMALLER, Calls, beside_a_guard, check_products, exact

HALF = blocks((1, 2))
FORMS = TWO_OF_FOUR, *map(blocks, SHARES)
# A processor that cannot put numbers where a mask says has no kernels for two of four.
BOTH = [form for form in (TWO_OF_FOUR, HALF) if supports(HOST, form)]


def name_of(form) -> str:
    return "blocks " + "/".join(map(str, form.kept)) if form.block > 1 else "2:4"


def drawn(rng, form, outputs, width):
    """Return any weights in any places that a form has."""
    (stored, _), (placed, kind) = form.parts(outputs, width).values()
    if form.block > 1:
        every = np.tile(np.arange(width // form.block), (outputs, 1))
        places = np.sort(rng.permuted(every, axis=1)[:, : placed[1]], axis=1).astype(kind)
    else:
        pairs = np.array([bits for bits in range(16) if bits.bit_count() == 2], kind)
        low, high = (pairs[rng.integers(0, len(pairs), placed)] for _ in range(2))
        places = low | high << 4
    return QuantizedArray.of(form, [rng.standard_normal(stored, np.float32).astype(jnp.bfloat16), places])


@functools.cache
def calls(vectors, form, count=1):
    return Calls(sparse_module(vectors, form, count))


def multiply(vectors, rows_MK, *matrices):
    return calls(vectors, matrices[0].form, len(matrices)).products(vectors, rows_MK, matrices)


def check(vectors, form, rows, width, outputs):
    """Compare products with NumPy's, and each row's bits with those that it has alone."""
    rng = np.random.default_rng(rows + width + outputs)
    rows_MK = rng.standard_normal((rows, width), np.float32).astype(jnp.bfloat16)
    matrix = drawn(rng, form, outputs, width)
    (found,) = multiply(vectors, rows_MK, matrix)
    weights = exact(matrix.dequantize())
    check_products(found, rows_MK, weights)
    for row in {0, rows // 2, rows - 1}:
        assert multiply(vectors, rows_MK[row : row + 1], matrix)[0].tobytes() == found[row].tobytes()


@pytest.mark.parametrize("form", BOTH, ids=name_of)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(st.one_of(st.integers(1, 14), st.sampled_from([17, 40])), st.integers(1, 4), st.integers(1, 70))
def test_a_row_has_the_products_of_its_weights_whatever_rows_are_beside_it(form, rows, units, outputs):
    check(HOST, form, rows, units * form.unit, outputs)


def test_blocks_are_multiplied_alike_by_another_processors_vectors():
    for rows, width, outputs in ((1, 128, 7), (5, 64, 21)):
        check(replace(SMALLER[0], dtypes=HOST.dtypes), HALF, rows, width, outputs)


@pytest.mark.parametrize("form", BOTH, ids=name_of)
def test_several_matrices_are_whole_and_nothing_beside_them_is_read(form):
    rng = np.random.default_rng(2)
    for rows, counts in itertools.product((1, 14), ((1, 5, 2), (90, 4, 30))):
        rows_MK = rng.standard_normal((rows, 128), np.float32).astype(jnp.dtype(HOST.row_dtype("bfloat16")))
        matrices = [drawn(rng, form, count, 128) for count in counts]
        matrices = [jax.tree.map(lambda part: beside_a_guard(part, True), each) for each in matrices]
        for found, matrix in zip(multiply(HOST, beside_a_guard(rows_MK, True), *matrices), matrices, strict=True):
            np.testing.assert_allclose(found, exact(rows_MK) @ exact(matrix.dequantize()).T, atol=1e-3)


@pytest.mark.parametrize(
    "form",
    [
        each if each in (TWO_OF_FOUR, blocks((2, 3))) else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in FORMS
    ],
    ids=name_of,
)
def test_the_largest_weights_of_a_row_are_kept_where_they_were(form):
    """Two of each four, or the blocks with the largest sums of squares; by NumPy and by XLA, of a stack too."""
    weights = np.random.default_rng(3).standard_normal((2, 5, 384), np.float32)
    weights[0, 0], weights[1, 1, 7] = 0, 100
    found = round_to_nearest(jnp.asarray(weights), form)
    pieces = np.square(weights).reshape(2, 5, -1, 4) if form.block == 1 else None
    if pieces is None:
        sums = np.square(weights).reshape(2, 5, -1, 32).sum(-1)
        most = np.sort(sums, axis=-1)[..., -form.num_kept(12)]
        is_kept = np.repeat(sums >= most[..., None], 32, axis=-1)
    else:
        is_kept = (pieces >= np.sort(pieces, axis=-1)[..., 2:3]).reshape(weights.shape)
    expected = np.where(is_kept, weights, 0).astype(jnp.bfloat16).astype(np.float32)
    assert found.shape == weights.shape
    assert np.asarray(jax.jit(QuantizedArray.dequantize)(found)).tobytes() == expected.tobytes()
    on_host = jax.tree.map(np.asarray, found)
    assert on_host.dequantize().tobytes() == expected.tobytes()
    parts = form.parts(5, 384)
    assert [(part.shape[1:], part.dtype.name) for part in on_host.matrix] == list(parts.values())
    assert are_places(on_host.places, 384, form)


@pytest.mark.parametrize("form", [TWO_OF_FOUR, HALF], ids=name_of)
def test_what_is_no_number_is_kept_and_so_found(form):
    weights = np.ones((2, 128), np.float32)
    weights[1, 3] = np.nan
    found = round_to_nearest(jnp.asarray(weights), form)
    assert not np.isfinite(found.float_scales()).all()
    assert are_places(np.asarray(found.matrix[1]), 128, form)


@pytest.mark.parametrize("form", [TWO_OF_FOUR, pytest.param(HALF, marks=pytest.mark.exhaustive)], ids=name_of)
def test_a_product_by_xla_has_the_same_weights_and_derivatives_are_theirs(form):
    rng = np.random.default_rng(4)
    inputs = jnp.asarray(rng.standard_normal((2, 3, 64), np.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    kernel = jax.tree.map(jnp.asarray, drawn(rng, form, 9, 64))
    weights = exact(jax.tree.map(np.asarray, kernel).dequantize())
    expected = exact(inputs) @ weights.T
    backend = choose_backend("float32", "cpu")
    for chosen in (backend, replace(backend, cpu_kernels=False)):
        found = jax.jit(lambda rows, one, chosen=chosen: linears(rows, [(one, None)], chosen)[0])(inputs, kernel)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    slope = jax.jit(jax.grad(lambda rows, one: multiply_few_bits(rows, one.form, (one.matrix,))[0].sum()))
    columns = np.broadcast_to(weights.sum(0), (3, 64))
    np.testing.assert_allclose(slope(inputs[0], kernel), columns, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", [TWO_OF_FOUR, HALF], ids=name_of)
def test_places_that_say_otherwise_than_the_form_are_told(form):
    """Products read what places say: a block beyond a row would be memory of another's."""
    places = drawn(np.random.default_rng(5), form, 3, 128).places.copy()
    assert are_places(places, 128, form)
    places[1, 1] = 9 if form.block > 1 else 0
    assert not are_places(places, 128, form)
    for fields in ({"kept": (3, 4)}, {"block": 16}, {"kept": (2, 4), "block": 32}):
        with pytest.raises(ValueError, match="no format keeps"):
            format_from({"bits": 16, "group": None, "levels": (), "kept": (2, 4), **fields})


def test_two_of_four_are_padded_and_split_as_their_weights_are_and_blocks_by_outputs_alone():
    rng, mesh = np.random.default_rng(7), Mesh(np.array(jax.devices("cpu")[:1]), ("tensor",))
    rows, inputs = np.array([0, 1, -1, 2]), np.concatenate([np.arange(32, 64), np.full(32, -1)])
    by_inputs = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    for form in (TWO_OF_FOUR, HALF):
        matrix = drawn(rng, form, 3, 64)
        weights = matrix.dequantize()
        expected = np.where(rows[:, None] < 0, 0, weights[rows])
        assert take_quantized(matrix, [rows, None]).dequantize().tobytes() == expected.tobytes()
        if form.block > 1:
            with pytest.raises(InvalidOption, match="would move them: use 2:4"):
                take_quantized(matrix, [None, inputs])
        else:
            found = take_quantized(matrix, [None, inputs]).dequantize()
            assert (found == np.where(inputs < 0, 0, weights[:, inputs])).all()
        assert check_split(matrix, by_inputs, "w") == 64


def test_what_is_stored_is_less_than_bfloat16_by_its_share():
    rng = np.random.default_rng(6)
    found = {name_of(form): sum(part.nbytes for part in drawn(rng, form, 8, 768).matrix) for form in FORMS}
    shares = {"2:4": 9 / 16, **{f"blocks {some}/{every}": some / every * 33 / 32 for some, every in SHARES}}
    assert found == {name: 2 * 8 * 768 * share for name, share in shares.items()}
