"""The CPU's own products: against NumPy, in any company, from many threads."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.cpu_kernels import products
from jaxinfer.ops.cpu_kernels.product_code import dot_module
from jaxinfer.ops.matmul import product
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, beside_a_guard, drawn, exact
from tests.toys import float32_backend


@functools.cache
def dot_calls(vectors, dtype):
    return Calls(dot_module(vectors, dtype))


def multiply_directly(rows_BCMK, weights_LBSF, layer, outputs, vectors=HOST):
    """Call the kernel as XLA does; it is compiled once for all shapes, where XLA compiles a program for each."""
    batch, groups, count, numbers = rows_BCMK.shape
    dtype = weights_LBSF.dtype.name
    rows_IMK = rows_BCMK.reshape(-1, count, numbers).astype(jnp.dtype(vectors.row_dtype(dtype)))
    calls = dot_calls(vectors, dtype)
    (found,) = calls.call([rows_IMK, np.array(layer, np.int32), weights_LBSF], [(len(rows_IMK), count, outputs)])
    return found.reshape(batch, groups, count, outputs)


multiply_by_xla = jax.jit(products.multiply, static_argnums=3)


def check_multiply(multiply, rng, dtype, batch, groups, rows, numbers, outputs, spare=(0, 0), layers=1, layer=0):
    rows_BCMK = drawn(rng, (batch, groups, rows, numbers), dtype)
    shape = layers, batch, outputs + spare[0], groups * numbers + spare[1]
    weights_LBSF = drawn(rng, shape, dtype)
    assert products.multiplies(dtype, numbers)
    found = multiply(rows_BCMK, weights_LBSF, layer, outputs)
    parts = exact(weights_LBSF)[layer, :, :outputs, : groups * numbers].reshape(batch, outputs, groups, numbers)
    expected = np.einsum("bcmk,bnck->bcmn", exact(rows_BCMK), parts)
    np.testing.assert_allclose(found, expected, atol=1e-5 * numbers**0.5)


# Not every processor converts float16.
DTYPES = pytest.mark.parametrize("dtype", [each for each in ("float32", "bfloat16", "float16") if each in HOST.dtypes])
any_shape = settings(derandomize=True, max_examples=25, deadline=None)


any_number_of_rows = st.one_of(st.integers(1, 18), st.sampled_from([31, 64, 97]))
products_of_any_shape = given(
    st.tuples(*[st.integers(1, 3)] * 2, any_number_of_rows, st.integers(1, 150), st.integers(1, 70)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)


def check_any_multiply(multiply, dtype, shape, spare, layer):
    batch, groups, rows, numbers, outputs = shape
    check_multiply(multiply, np.random.default_rng(rows), dtype, batch, groups, rows, numbers, outputs, spare, 3, layer)


@DTYPES
@any_shape
@products_of_any_shape
def test_rows_times_weights_of_any_shape(dtype, shape, spare, layer):
    check_any_multiply(multiply_directly, dtype, shape, spare, layer)


@pytest.mark.slow
@DTYPES
@any_shape
@products_of_any_shape
def test_rows_times_weights_of_any_shape_by_xla(dtype, shape, spare, layer):
    check_any_multiply(multiply_by_xla, dtype, shape, spare, layer)


@DTYPES
@pytest.mark.parametrize(("rows", "numbers"), [(7, 45), (64, 32)])
def test_xla_calls_the_kernels(dtype, rows, numbers):
    """With rows and outputs that are no multiple of a tile's, and numbers that are no multiple of a vector's."""
    check_any_multiply(multiply_by_xla, dtype, (2, 3, rows, numbers, 37), (1, 8), 1)


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_records_freed(pool):
    """Of three matrices with rows and columns of their own, and of layers and parts."""
    rng = np.random.default_rng(6)
    calls = Calls(dot_module(HOST, "float32", 3), pool, threads=5)
    for rows, outputs in itertools.product((1, 4, 9), ((1, 5, 2), (90, 4, 300), (700, 1, 3))):
        rows_IMK = rng.standard_normal((4, rows, 64), dtype=np.float32)
        stacks = [
            rng.standard_normal((3, 2, count + spare, 128 + 8 * spare), dtype=np.float32)
            for spare, count in enumerate(outputs)
        ]
        found = calls.call([rows_IMK, np.array(2, np.int32), *stacks], [(4, rows, count) for count in outputs])
        for result, stack_LBSF, count in zip(found, stacks, outputs):
            parts = stack_LBSF[2, :, :count, :128].reshape(2, count, 2, 64)
            expected = np.einsum("bcmk,bnck->bcmn", rows_IMK.reshape(2, 2, rows, 64), parts)
            np.testing.assert_allclose(result, expected.reshape(result.shape), atol=1e-4)
    calls.finish()


def test_a_layer_is_counted_as_jax_counts_it():
    rng = np.random.default_rng(7)
    rows, weights = drawn(rng, (1, 1, 2, 32)), drawn(rng, (3, 1, 6, 32))
    pick = jax.jit(lambda stack, index: stack[index])
    for layer in (-4, -3, -1, 0, 2, 3, 1 << 24):
        found = multiply_by_xla(rows, weights, layer, 6)
        expected = np.einsum("mk,nk->mn", exact(rows)[0, 0], exact(pick(weights, layer))[0])
        np.testing.assert_allclose(found[0, 0], expected, atol=1e-4)


def test_a_row_has_the_same_results_among_any_others():
    rng = np.random.default_rng(1)
    rows_MK, weights_NK = drawn(rng, (37, 576), "bfloat16"), drawn(rng, (50, 576), "bfloat16")

    @jax.jit
    def each(rows):
        return products.multiply(rows[None, None], jnp.asarray(weights_NK)[None, None], 0, 50)[0, 0]

    whole = each(rows_MK)
    for first, count in ((0, 1), (5, 1), (3, 2), (30, 7), (2, 16)):
        np.testing.assert_array_equal(each(rows_MK[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize("vectors", [HOST, *SMALLER], ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")
def test_a_row_has_the_same_results_among_any_number_of_others(vectors):
    """Of rows in several parts, outputs in several blocks, and rests of both; with another first row each time."""
    rng = np.random.default_rng(3)
    for dtype, numbers in itertools.product(vectors.dtypes, (9, 1601)):
        rows_MK = drawn(rng, (513, numbers), dtype)
        weights_NK = (rng.standard_normal((270, numbers), np.float32) * 20).astype(jnp.dtype(dtype))
        stack_LBSF = weights_NK[None, None]
        whole = multiply_directly(rows_MK[None, None], stack_LBSF, 0, 270, vectors)[0, 0]
        expected = exact(rows_MK[:7]) @ exact(weights_NK).T
        np.testing.assert_allclose(whole[:7], expected, atol=1e-3 * numbers**0.5)
        for count in (1, 2, 7, 64, 65, 200):
            for first in (0, 513 - count, 250):
                rows_BCMK = rows_MK[None, None, first : first + count]
                found = multiply_directly(rows_BCMK, stack_LBSF, 0, 270, vectors)[0, 0]
                np.testing.assert_array_equal(found, whole[first : first + count])


@pytest.mark.parametrize("vectors", [HOST, *SMALLER], ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_is_read_outside_of_arrays(vectors, at_end):
    """The memory before or after each of them cannot be read: an attempt ends the process."""
    rng = np.random.default_rng(4)
    for dtype, numbers, rows in itertools.product(vectors.dtypes, (1, 7, 33, 50), (1, 8, 13)):
        weights = drawn(rng, (1, 1, 6, numbers), dtype)
        arrays = drawn(rng, (1, rows, numbers), vectors.row_dtype(dtype)), np.array(0, np.int32), weights
        (expected,) = dot_calls(vectors, dtype).call(arrays, [(1, rows, 6)])
        guarded = [beside_a_guard(array, at_end) for array in arrays]
        (found,) = dot_calls(vectors, dtype).call(guarded, [(1, rows, 6)])
        np.testing.assert_array_equal(found, expected)


def test_calls_from_many_threads_at_once():
    rng = np.random.default_rng(2)
    weights_NK = drawn(rng, (300, 512))
    multiply = jax.jit(lambda rows: products.multiply(rows[None, None], jnp.asarray(weights_NK)[None, None], 0, 300))
    inputs = [drawn(rng, (count % 5 + 1, 512)) for count in range(60)]
    expected = [multiply(rows) for rows in inputs]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(5):
            for found, alone in zip(pool.map(multiply, inputs), expected):
                np.testing.assert_array_equal(found, alone)


def test_products_of_other_shapes_and_dtypes_are_left_to_xla():
    backend = float32_backend()
    rng = np.random.default_rng(5)

    def is_own(rows, weights):
        text = jax.jit(lambda x, w: product(x, w, backend)).lower(rows, weights).as_text()
        return "jaxinfer_multiply" in text

    rows, weights = drawn(rng, (3, 64)), drawn(rng, (10, 64))
    assert is_own(rows, weights)
    assert is_own(drawn(rng, (700, 64)), weights)
    assert is_own(drawn(rng, (3, 61)), drawn(rng, (10, 61)))
    text = jax.jit(lambda x, w: product(x, w, backend, transposed=True)).lower(rows, weights.T).as_text()
    assert "jaxinfer_multiply" not in text
