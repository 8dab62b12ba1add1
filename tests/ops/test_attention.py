"""Attention, its masks, products and embeddings by XLA against plain NumPy; the CPU's kernels have their own tests."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.masks import causal_ancestors, visible_slots
from jaxinfer.ops.matmul import linear, product
from tests.toys import float32_backend

FLOAT32 = replace(float32_backend(), cpu_kernels=False)
BFLOAT16 = replace(choose_backend("bfloat16", "cpu"), cpu_kernels=False)


ATTENTION = tuple(
    pytest.param(*case, id="-".join(map(str, case)), marks=() if is_ordinary else pytest.mark.slow)
    for case in itertools.product((1, 3, 40), ((4, 4), (4, 2), (4, 1)), (None, 2.0))
    for is_ordinary in [case in ((1, (4, 2), 2.0), (3, (4, 1), None), (40, (4, 4), None), (40, (4, 2), 2.0))]
)
attend_jitted = jax.jit(attend, static_argnums=(4, 5, 6))


@pytest.mark.parametrize(("new_tokens", "heads", "softcap"), ATTENTION)
def test_attention_equals_a_softmax_over_the_seen_slots(new_tokens, heads, softcap):
    num_heads, kv_heads = heads
    rng = np.random.default_rng(num_heads + kv_heads)
    batch, slots, width = 2, 48, 6
    query = rng.standard_normal((batch, new_tokens, num_heads, width))
    keys, values = rng.standard_normal((2, batch, slots, kv_heads, width))
    mask = rng.random((batch, new_tokens, slots)) < 0.4
    mask[:, :, 0] = True
    flat = (array.reshape(batch, slots, -1).astype(np.float32) for array in (keys, values))
    found = attend_jitted(query.astype(np.float32), *flat, mask, 0.3, FLOAT32, softcap)
    own = np.arange(num_heads) * kv_heads // num_heads
    scores = np.einsum("btnh,bsnh->btns", query, keys[:, :, own]) * 0.3
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask[:, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("btns,bsnh->btnh", weights, values[:, :, own]), atol=1e-5)


def test_a_query_that_sees_nothing_gets_finite_numbers():
    query, held, mask = np.ones((1, 2, 2, 4), np.float32), np.ones((1, 8, 8), np.float32), np.zeros((1, 2, 8), bool)
    np.testing.assert_allclose(attend_jitted(query, held, held, mask, 0.5, FLOAT32, None), 1, atol=1e-6)


visible = jax.jit(visible_slots, static_argnums=(2, 3))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=2), st.integers(0, 2**32 - 1))
def test_visible_slots_are_the_committed_ones_and_the_ancestors(starts, seed):
    ancestors_BTT = np.random.default_rng(seed).random((2, 3, 3)) < 0.5
    mask_BTS = visible(np.array(starts, np.int32), ancestors_BTT, 12)
    for row, start in enumerate(starts):
        for token in range(3):
            own = {start + other for other in np.flatnonzero(ancestors_BTT[row, token])}
            assert set(np.flatnonzero(mask_BTS[row, token])) == {*range(start), *own}


@pytest.mark.parametrize("window", [None, 2])
def test_the_last_tokens_of_a_tree_see_what_they_see_in_a_pass_over_all_of_it(window):
    parents = [0, 0, 1, 1, 2, 3, 5]
    ancestors_BTT = np.eye(7, dtype=bool)[None]
    for node, parent in enumerate(parents[1:], 1):
        ancestors_BTT[0, node] |= ancestors_BTT[0, parent]
    starts = np.array([4, 0], np.int32)
    whole, last = (visible(starts, ancestors_BTT[:, first:], 14, window) for first in (0, 4))
    np.testing.assert_array_equal(last, whole[:, 4:])


def test_causal_ancestors_are_all_tokens_before():
    assert causal_ancestors(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("rows", [(1,), (2, 3), (5,)])
@pytest.mark.parametrize("backend", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_products_equal_those_of_numpy(rows, backend):
    """Padding few rows up to what runs fast is not seen, and sums are not rounded to 16 bits."""
    rng = np.random.default_rng(0)
    kernel, bias, inputs = (
        rng.standard_normal(shape, np.float32).astype(backend.param_dtype) for shape in ((7, 300), 7, (*rows, 300))
    )
    inputs = inputs.astype(backend.compute_dtype)

    @jax.jit
    def both(inputs, kernel, bias):
        return product(inputs, kernel, backend), linear(inputs, kernel, bias, backend)

    without_bias, with_bias = both(inputs, kernel, bias)
    expected = np.asarray(inputs, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(without_bias, expected, atol=1e-4)
    assert with_bias.dtype == backend.compute_dtype
    np.testing.assert_allclose(with_bias, expected + np.asarray(bias, np.float64), atol=1e-4)


@pytest.mark.parametrize("backend", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_embeddings_are_rows_of_the_table(backend):
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(backend.param_dtype)
    ids = np.array([[0, 8, 3], [12, -5, 1]], np.int32)
    found = jax.jit(embed, static_argnums=2)(table, ids, backend)
    assert found.dtype == backend.compute_dtype
    expected = np.asarray(table, np.float32)[[[0, 8, 3], [8, 0, 1]]]
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
