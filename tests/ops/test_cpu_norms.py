"""On a CPU, a row's norm depends, bit for bit, on the row alone: not on the other rows, their number or the threads.

XLA's own norms are the counterexample: one row of 1,536 numbers differs from the same row among sixteen.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.norm import Norm
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.norms import layer_norm_module, norm_rows, rms_norm_module
from tests.ops.foreign_calls import HOST, POOLS, Calls, drawn
from tests.toys import TINY_LLAMA

EPSILON = 1e-5
LENGTHS = (1, 2, 31, 32, 33, 64, 100, 577)


def expected(rows, scale, bias=None):
    """Compute in float64."""
    rows, scale = rows.astype(np.float64), scale.astype(np.float64)
    if bias is not None:
        rows = rows - rows.mean(axis=-1, keepdims=True)
    normed = rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + EPSILON) * scale
    return normed if bias is None else normed + bias


def directly(calls, *arrays):
    (found,) = calls.call([*arrays, np.full(1, EPSILON, np.float32)], [arrays[0].shape])
    return found


def modules():
    return (rms_norm_module, 2), (layer_norm_module, 3)


@POOLS
def test_whatever_the_pool_does_rows_are_normed_and_records_freed(pool):
    rng = np.random.default_rng(0)
    for build, count in modules():
        calls = Calls(build(HOST), pool, threads=5)
        for rows, length in (*itertools.product((0, 1, 9), LENGTHS), (2000, 577)):
            arrays = [5 + drawn(rng, (rows, length)), drawn(rng, (length,)), drawn(rng, (length,))][:count]
            np.testing.assert_allclose(directly(calls, *arrays), expected(*arrays), atol=2e-4, rtol=1e-4)
        calls.finish()


@pytest.mark.parametrize(("build", "count"), modules(), ids=("rms", "layer"))
def test_a_row_has_the_same_bits_alone_and_in_company(build, count):
    rng = np.random.default_rng(1)
    calls = Calls(build(HOST), threads=3)
    for length in (*LENGTHS, 1536):
        arrays = [drawn(rng, (17, length)), drawn(rng, (length,)), drawn(rng, (length,))][:count]
        together = directly(calls, *arrays)
        for first, number in ((0, 1), (16, 1), (3, 2), (5, 8)):
            part = directly(calls, arrays[0][first : first + number], *arrays[1:])
            np.testing.assert_array_equal(part, together[first : first + number])


def test_numbers_are_added_in_the_order_that_is_written_down():
    """Lane by lane and then in halves, with NumPy's single roundings; of many rows, as roundings of few may agree."""
    rng = np.random.default_rng(2)
    calls = Calls(rms_norm_module(HOST))
    for length in (7, 96, 100):
        rows, scale = drawn(rng, (50, length)), np.ones(length, np.float32)
        lanes = np.zeros((50, 32), np.float32)
        for start in range(0, length, 32):
            part = rows[:, start : start + 32]
            lanes[:, : part.shape[1]] += part * part
        while lanes.shape[1] > 1:
            lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
        inverse = np.float32(1) / np.sqrt(lanes / np.float32(length) + np.float32(EPSILON))
        np.testing.assert_array_equal(directly(calls, rows, scale), rows * inverse)


@pytest.mark.optimised
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer", "plain_layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_norm_keeps_a_rows_bits_whatever_is_computed_around_it(kind, dtype):
    config = DecoderConfig(**{**TINY_LLAMA.__dict__, "norm": kind})
    backend = choose_backend(dtype, "cpu")
    rng = np.random.default_rng(3)
    hidden, added = drawn(rng, (5, 4, 1536)), drawn(rng, (5, 4, 1536))
    norm = Norm(config, backend)
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(drawn(rng, leaf.shape), leaf.dtype), norm.init(jax.random.key(0), jnp.asarray(hidden))
    )

    def apply(hidden, added):
        return norm.apply(variables, hidden + added) * 2

    together = jax.jit(apply)(hidden, added)
    for part in (np.s_[:1, :1], np.s_[4:, :2], np.s_[:3], np.s_[1:3, 1:2]):
        np.testing.assert_array_equal(jax.jit(apply)(hidden[part], added[part]), together[part])
    by_xla = Norm(config, choose_backend(dtype, "cpu", scan_layers=True)).apply(variables, jnp.asarray(hidden + added))
    np.testing.assert_allclose(together, np.asarray(by_xla) * 2, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_the_formula():
    rng = np.random.default_rng(4)
    rows, scale, bias = drawn(rng, (3, 40)), drawn(rng, (40,)), drawn(rng, (40,))

    def own(rows, scale, bias):
        return jnp.sum(jnp.sin(norm_rows(rows, scale, bias, EPSILON) + norm_rows(rows, scale, None, EPSILON)))

    def plain(rows, scale, bias):
        centred = rows - rows.mean(axis=-1, keepdims=True)
        one, other = (
            each * jax.lax.rsqrt(jnp.mean(each**2, axis=-1, keepdims=True) + EPSILON) * scale
            for each in (centred, rows)
        )
        return jnp.sum(jnp.sin(one + bias + other))

    by_both = (jax.jit(jax.grad(function, (0, 1, 2)))(rows, scale, bias) for function in (own, plain))
    for found, wanted in zip(*by_both):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        assert np.any(wanted)


def test_what_is_no_norm_is_refused():
    rows, scale = jnp.ones((2, 8)), jnp.ones(8)
    for wrong in ((rows, scale[:7], None), (rows.astype(jnp.bfloat16), scale, None), (rows, scale, scale[:1])):
        with pytest.raises((ValueError, TypeCheckError)):
            norm_rows(*wrong, EPSILON)
    assert norm_rows(rows[:0], scale, None, EPSILON).shape == (0, 8)
