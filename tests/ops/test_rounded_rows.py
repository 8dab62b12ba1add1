"""Rows in int8: what they are rounded to, and products with weights in few bits, which are exact before scales."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.rounded_rows.product_code import rounded_module
from jaxinfer.ops.cpu_kernels.rounded_rows.products import padded_rows, round_rows_by_kernel
from jaxinfer.ops.cpu_kernels.rounded_rows.rounding_code import rounding_module
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, INT8, UNSIGNED, Format, int4, nf4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.rounded_rows import multiplies_rounded, round_rows
from jaxinfer.ops.matmul import linear, linears
from tests.ops.foreign_calls import HOST, Calls, beside_a_guard, exact

# Each number of vectors in a group, with minima, offsets and bytes.
SOME = [INT8, int4(32, False), int4(64, True), int4(128, False), GGUF_FORMATS["Q8_0"]]
# The same without instructions for bytes, and with vectors of half the size.
WITHOUT = replace(HOST, dots_bytes=0, pairs_bytes=False)
PAIRS = replace(HOST, dots_bytes=0)
OTHERS = [
    replace(each, lanes=lanes, rows=rows, pairs_bfloat16=False)
    for lanes, rows in ((16, 6), (8, 3))
    for each in (WITHOUT, PAIRS)
]
few_examples = settings(derandomize=True, max_examples=10, deadline=None)


def name_of(form: Format) -> str:
    return f"{form.bits}-{form.group or 'row'}{'-minima' if form.has_minima else ''}"


def drawn(rng, form, outputs, width) -> QuantizedArray:
    """Return any codes at all, with scales and minima of either sign."""
    parts = [
        rng.integers(0, 256, shape, np.uint8).view(dtype)
        if np.dtype(dtype).itemsize == 1
        else rng.standard_normal(shape).astype(dtype)
        for shape, dtype in form.parts(outputs, width).values()
    ]
    return QuantizedArray.of(form, parts)


def codes_of(rng, rows, width):
    """Return rows that are rounded already, as products read them."""
    codes_MK = rng.integers(-127, 128, (rows, width)).astype(np.int8)
    return codes_MK, rng.uniform(0.5, 2, (rows, 1)).astype(np.float32)


def padded(codes_MK, scales_M1, group):
    """Return what kernels read of rows, by NumPy."""
    rows, width = codes_MK.shape
    sums_MG = codes_MK.astype(np.float32).reshape(rows, -1, group or width).sum(axis=2)
    more = 0 if group is None else -sums_MG.shape[1] % 16
    return np.pad(codes_MK, ((0, 0), (0, -width % 64))), np.pad(sums_MG, ((0, 0), (0, more))), scales_M1


@functools.cache
def calls(vectors, form, count=1):
    return Calls(rounded_module(vectors, form, count))


def multiply(vectors, codes_MK, scales_M1, *matrices):
    form = matrices[0].form
    operands = [part for matrix in matrices for part in matrix.matrix]
    shapes = [(len(codes_MK), each.shape[0]) for each in matrices]
    return calls(vectors, form, len(matrices)).call([*padded(codes_MK, scales_M1, form.group), *operands], shapes)


def dense(matrix):
    return exact(jax.tree.map(np.asarray, matrix).dequantize())


def check(vectors, form, rows, width, outputs):
    rng = np.random.default_rng(rows + width + outputs)
    codes_MK, scales_M1 = codes_of(rng, rows, width)
    matrix = drawn(rng, form, outputs, width)
    (found,) = multiply(vectors, codes_MK, scales_M1, matrix)
    if form == INT8:
        whole = codes_MK.astype(np.int64) @ matrix.codes.T.astype(np.int64)
        assert found.tobytes() == (whole.astype(np.float32) * matrix.scales[:, 0] * scales_M1).tobytes()
    weights, x = dense(matrix), exact(codes_MK) * scales_M1
    assert (np.abs(found - x @ weights.T) <= 3e-6 * (np.abs(x) @ np.abs(weights).T)).all()


@pytest.mark.parametrize("form", SOME, ids=name_of)
@few_examples
@given(st.one_of(st.integers(1, 14), st.just(40)), st.integers(1, 5), st.integers(1, 70))
def test_rows_times_codes_of_any_shape(form, rows, groups, outputs):
    check(HOST, form, rows, groups * form.unit, outputs)


@pytest.mark.parametrize("form", [INT8, int4(32, False)], ids=name_of)
def test_a_row_has_the_same_results_alone_and_among_others(form):
    """In any tile, and among the outputs of other matrices."""
    rng = np.random.default_rng(1)
    codes_MK, scales_M1 = codes_of(rng, 40, 96)
    matrices = drawn(rng, form, 23, 96), drawn(rng, form, 6, 96)
    alone = [
        np.concatenate([multiply(HOST, *row, each)[0] for row in zip(codes_MK[:, None], scales_M1[:, None])])
        for each in matrices
    ]
    for count in (2, 7, 40):
        for found, expected in zip(multiply(HOST, codes_MK[:count], scales_M1[:count], *matrices), alone):
            assert found.tobytes() == expected[:count].tobytes()


@pytest.mark.parametrize(
    "form",
    [
        INT8,
        pytest.param(int4(64, False), marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SOME[1:] if each != int4(64, False)),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("vectors", OTHERS, ids=lambda each: f"{each.lanes} lanes{', pairs' * each.pairs_bytes}")
def test_processors_without_instructions_for_bytes_have_the_same_bits(vectors, form):
    """Of the largest codes too, whose products do not fit into 16 bits when two are added."""
    rng = np.random.default_rng(2)
    for rows, outputs, sizes in ((3, 9, "any"), (2, 5, "largest"), (2, 5, "of one sign")):
        width = 2 * max(form.unit, 48) // form.unit * form.unit
        codes_MK, scales_M1 = codes_of(rng, rows, width)
        matrix = drawn(rng, form, outputs, width)
        if sizes != "any":
            codes_MK = np.where((codes_MK < 0) & (sizes == "largest"), np.int8(-127), np.int8(127))
            matrix.codes[...] = 255 if form.bits == 4 else 127 if sizes == "largest" else -128
        found, expected = (multiply(each, codes_MK, scales_M1, matrix)[0] for each in (vectors, HOST))
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", [INT8, int4(32, False)], ids=name_of)
def test_nothing_beside_the_arrays_is_read(form):
    """Rows of one and a half vectors, of which the last are the last in memory."""
    rng = np.random.default_rng(3)
    codes_MK, scales_M1 = codes_of(rng, 7, 96)
    matrix = drawn(rng, form, 6, 96)
    (expected,) = multiply(HOST, codes_MK, scales_M1, matrix)
    for at_end in (True, False):
        given = [beside_a_guard(each, at_end) for each in (*padded(codes_MK, scales_M1, form.group), *matrix.matrix)]
        (found,) = calls(HOST, form).call(given, [(7, 6)])
        assert found.tobytes() == expected.tobytes()


def test_rows_are_rounded_to_the_nearest_by_their_largest_number():
    """By the kernel as by XLA; a row of zeros stays one, and what is no number makes its row none."""
    rng = np.random.default_rng(4)
    rows_MK = rng.standard_normal((9, 96), np.float32) * np.exp(3 * rng.standard_normal((9, 1))).astype(np.float32)
    rows_MK[2] = 0
    codes_MK, scales_M1 = (np.asarray(part) for part in jax.jit(round_rows)(jnp.asarray(rows_MK)))
    assert (np.abs(codes_MK).max(axis=1) == np.where(np.arange(9) == 2, 0, 127)).all()
    assert (np.abs(codes_MK * exact(scales_M1) - rows_MK) <= 0.5001 * scales_M1).all()
    for group in (None, 32):
        one, other = jax.jit(
            lambda rows_MK, group=group: (
                padded_rows(round_rows(rows_MK), group), round_rows_by_kernel(rows_MK, group)
            )
        )(jnp.asarray(rows_MK))  # fmt: skip
        expected = padded(codes_MK, scales_M1, group)
        for parts in zip(one, other, expected, strict=True):
            assert len({np.asarray(part).tobytes() for part in parts}) == 1
    rows_MK[4, 95] = np.nan
    with_nan = jnp.asarray(rows_MK)
    found = [np.asarray(scales) for scales in (round_rows(with_nan)[1], round_rows_by_kernel(with_nan, None)[2])]
    assert all(np.isnan(each[:, 0]).tolist() == [row == 4 for row in range(9)] for each in found)
    given, shapes = beside_a_guard(np.nan_to_num(rows_MK), True), [(9, 128), (9, 1), (9, 1)]
    again = Calls(rounding_module(HOST, None)).call([given], shapes, (np.int8, np.float32, np.float32))
    assert (again[0][0] == np.pad(codes_MK[0], (0, 32))).all()


@pytest.mark.parametrize("form", [INT8, int4(32, False), int4(64, True)], ids=name_of)
def test_xla_multiplies_the_same_where_there_are_no_kernels(form):
    """Several matrices in one call, and inputs of any number of axes, or none."""
    rng = np.random.default_rng(5)
    kernels = [jax.tree.map(jnp.asarray, drawn(rng, form, count, 128)) for count in (9, 5)]
    inputs = jnp.asarray(rng.standard_normal((2, 3, 128), np.float32))
    backend = choose_backend("float32", "cpu", activations="int8")
    rows = round_rows(inputs.reshape(6, 128))
    x = exact(rows.codes_MK) * exact(rows.scales_M1)
    for chosen in (backend, replace(backend, cpu_kernels=False)):
        found = jax.jit(lambda x, kernels, b=chosen: linears(x, [(each, None) for each in kernels], b))(inputs, kernels)
        for result, kernel in zip(found, kernels, strict=True):
            size = np.abs(x) @ np.abs(dense(kernel)).T
            assert (np.abs(result.reshape(6, -1) - x @ dense(kernel).T) <= 3e-6 * size).all()
        assert linear(inputs[:0], kernels[0], None, chosen).shape == (0, 3, 9)


def test_products_have_the_derivatives_of_rows_as_they_are():
    rng = np.random.default_rng(6)
    matrix = jax.tree.map(jnp.asarray, drawn(rng, INT8, 4, 32))
    backend = choose_backend("float32", "cpu", activations="int8")
    slope = jax.grad(lambda rows: linear(rows, matrix, None, backend).sum())(jnp.ones((2, 32)))
    expected = np.broadcast_to(dense(matrix).sum(0), (2, 32))
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-4)


def test_forms_that_rows_in_bytes_multiply():
    """Integers in equal groups or rows; Q4_K's scales are integers of other scales, and zeros are none of these."""
    assert all(map(multiplies_rounded, [*SOME, *map(GGUF_FORMATS.get, ("Q4_0", "Q4_1"))]))
    others = [*map(GGUF_FORMATS.get, ("Q4_K", "Q5_0", "Q6_K")), nf4(64), FP8]
    others += [Format(8, None, has_zeros=True), Format(4, None, UNSIGNED), replace(int4(32, False), is_ordered=True)]
    assert not any(map(multiplies_rounded, others))
