"""Products that leave features out: the bits of those that read everything, and nothing read of what is left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.ops.cpu_kernels.active import products
from jaxinfer.ops.cpu_kernels.active.column_code import column_module
from jaxinfer.ops.cpu_kernels.active.row_code import row_module
from jaxinfer.ops.cpu_kernels.product_code import dot_module
from jaxinfer.ops.sparsity import Sparsity, parse_sparsity
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, beside_a_guard, drawn

DTYPES = ("float32", "bfloat16")
# Rows for each kind of tile and for two blocks of sums; columns for wide tiles, single vectors and a part of one.
SHAPES = ((1, 70, 277), (2, 48, 149), (3, 34, 64), (7, 34, 83), (23, 50, 70))


@functools.cache
def calls(module, vectors, dtype):
    return Calls(module(vectors, dtype))


def dense(vectors, dtype, rows_MK, weights_NK):
    arguments = [rows_MK[None], np.array(0, np.int32), weights_NK[None, None]]
    (found,) = calls(dot_module, vectors, dtype).call(arguments, [(1, len(rows_MK), len(weights_NK))])
    return found[0]


def bits(array):
    return np.asarray(array, np.float32).view(np.int32)


def sparse_rows(rng, vectors, dtype, count, width, share):
    rows = drawn(rng, (count, width), vectors.row_dtype(dtype))
    rows[rng.random(rows.shape) < share / 2] = 0
    # Pairs, so that both are left out together where pairs are multiplied.
    rows[:, np.repeat(rng.random(width // 2) < share, 2)] = 0
    # Of zeros, both signs.
    rows[:, ::3] *= -1
    return rows


def unread(rows_MF, unit):
    """Return which features are left out: they and their neighbours in a unit are zero in all rows."""
    active = (np.asarray(rows_MF, np.float32) != 0).any(axis=0).reshape(-1, unit).any(axis=1)
    return ~np.repeat(active, unit)


@pytest.mark.parametrize("vectors", [HOST, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SMALLER)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_by_columns_have_the_bits_of_those_by_rows_and_read_no_more_than_they_need(vectors, dtype):
    """What is not read may even be NaN; and nothing past the arrays is read, which would end the process."""
    rng = np.random.default_rng(5)
    for count, features, outputs in SHAPES:
        for share in (0.0, 0.9, 1.0):
            rows_MF = sparse_rows(rng, vectors, dtype, count, features, share)
            columns_FN = drawn(rng, (features, outputs), dtype)
            expected = dense(vectors, dtype, rows_MF, np.ascontiguousarray(columns_FN.T))
            left_out = unread(rows_MF, 2 if vectors.pairs(dtype) else 1)
            assert left_out.any() == (share > 0)
            columns_FN[left_out] = np.nan
            for at_end in (True, False):
                operands = [beside_a_guard(each, at_end) for each in (rows_MF, columns_FN)]
                (found,) = calls(column_module, vectors, dtype).call(operands, [(count, outputs)])
                np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_made_of_underflow_has_the_sign_that_it_has_with_all_terms(dtype):
    """Every lane's sum underflows to -0, and where zeros follow with positive weights, their products make it +0."""
    step = HOST.step(dtype)
    rows_1F = np.concatenate([np.full(step, 1e-30), np.zeros(step)])[None].astype(jnp.dtype(HOST.row_dtype(dtype)))
    for following in (1.0, -1.0):
        weights_NF = np.concatenate([np.full((3, step), -1e-30), np.full((3, step), following)], axis=1)
        weights_NF = weights_NF.astype(jnp.dtype(dtype))
        expected = dense(HOST, dtype, rows_1F, weights_NF)
        (found,) = calls(column_module, HOST, dtype).call([rows_1F, np.ascontiguousarray(weights_NF.T)], [(1, 3)])
        np.testing.assert_array_equal(bits(found), bits(expected))
        assert not expected.any()


@pytest.mark.parametrize("vectors", [HOST, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SMALLER)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_rows_of_weights_have_the_bits_of_all_and_no_other_is_read(vectors, dtype):
    rng = np.random.default_rng(6)
    for count, outputs, width in SHAPES:
        for share in (0.0, 0.9, 1.0):
            rows_MK = drawn(rng, (count, width), vectors.row_dtype(dtype))
            active_MF = sparse_rows(rng, vectors, "float32", count, outputs, share)
            weights_FK = drawn(rng, (outputs, width), dtype)
            expected = dense(vectors, dtype, rows_MK, weights_FK)
            left_out = unread(active_MF, 1)
            expected[:, left_out], weights_FK[left_out] = 0, np.nan
            operands = [beside_a_guard(each, at_end=True) for each in (rows_MK, active_MF, weights_FK)]
            (found,) = calls(row_module, vectors, dtype).call(operands, [(count, outputs)])
            np.testing.assert_array_equal(bits(found), bits(expected))


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_memory_is_freed(pool):
    rng = np.random.default_rng(7)
    rows_MF, columns_FN = drawn(rng, (2, 300)), drawn(rng, (300, 520))
    rows_MF[:, rng.random(300) < 0.8] = 0
    by_columns, by_rows = (Calls(module(HOST, "float32"), pool) for module in (column_module, row_module))
    (found,) = by_columns.call([rows_MF, columns_FN], [(2, 520)])
    by_columns.finish()
    np.testing.assert_allclose(found, rows_MF @ columns_FN, atol=1e-4)
    weights_FK = np.ascontiguousarray(columns_FN)
    (chosen,) = by_rows.call([drawn(rng, (2, 520)), rows_MF, weights_FK], [(2, 300)])
    by_rows.finish()
    assert ((chosen != 0) == (rows_MF != 0).any(axis=0)).all()


def test_xla_calls_both_and_what_does_not_fit_is_refused():
    rng = np.random.default_rng(8)
    rows, weights = drawn(rng, (2, 32)), drawn(rng, (32, 48))
    found = jax.jit(products.multiply_columns)(rows, weights)
    np.testing.assert_allclose(found, rows @ weights, atol=1e-4)
    active = drawn(rng, (2, 48))
    active[:, ::2] = 0
    chosen = jax.jit(products.multiply_rows)(rows, active, np.ascontiguousarray(weights.T))
    np.testing.assert_allclose(chosen, (rows @ weights) * (np.arange(48) % 2), atol=1e-4)
    with pytest.raises(ValueError, match="do not fit"):
        products.multiply_columns(jnp.zeros((2, 0)), jnp.zeros((0, 4)))
    with pytest.raises(ValueError, match="do not fit"):
        products.multiply_rows(jnp.zeros((0, 4)), jnp.zeros((0, 3)), jnp.zeros((3, 4)))
    assert products.leaves_out("float32", 33, 8)
    assert not products.leaves_out("int8", 32, 8)
    assert products.leaves_out("bfloat16", 33, 8) == (not HOST.pairs("bfloat16"))


def test_thresholds_and_counts_decide_what_is_kept():
    numbers = jnp.array([[0.5, -0.25, 0.0, 0.25, jnp.nan, -2.0], [1e-30, 3.0, 0.375, -0.375, 0.125, 0.0]])
    threshold = Sparsity("threshold", 0.25).keep(numbers)
    np.testing.assert_array_equal(threshold, [[0.5, 0, 0, 0, np.nan, -2], [0, 3, 0.375, -0.375, 0, 0]])
    # Of equal ones, all or none; NaN counts as the largest.
    kept = {count: np.asarray(Sparsity("topk", count).keep(numbers)) for count in (1, 2, 3, 4, 9)}
    np.testing.assert_array_equal(kept[2], [[0, 0, 0, 0, np.nan, -2], [0, 3, 0.375, -0.375, 0, 0]])
    np.testing.assert_array_equal(kept[1][1], [0, 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(kept[3][1], kept[2][1])
    np.testing.assert_array_equal(kept[4][1], [0, 3, 0.375, -0.375, 0.125, 0])
    np.testing.assert_array_equal(kept[9], numbers)
    assert Sparsity("exact").keep(numbers) is numbers


def test_spellings():
    for text in ("exact", "threshold:0.01", "topk:12"):
        found = parse_sparsity(text)
        assert found is not None
        assert found.name == text
    assert parse_sparsity(None) is None
    wrong = {
        "exactly": "unknown sparsity 'exactly'; use exact, threshold:0.01 or topk:512",
        "exact:1": "unknown sparsity",
        "threshold": "a threshold is a number above 0",
        "threshold:0": "a threshold is a number above 0",
        "threshold:nan": "a threshold is a number above 0",
        "topk:0": "a whole number of 1 or more",
        "topk:1.5": "a whole number of 1 or more",
        7: "sparsity 7 is not a text",
    }
    for text, message in wrong.items():
        with pytest.raises(InvalidOption, match=message):
            parse_sparsity(text)
