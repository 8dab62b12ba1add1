"""Attention, its masks, products and embeddings against plain NumPy."""

import jax.numpy as jnp
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

FLOAT32 = float32_backend()
BFLOAT16 = choose_backend("bfloat16", "cpu")


@pytest.mark.parametrize("new_tokens", [1, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_a_softmax_over_the_seen_slots(new_tokens, heads, kv_heads):
    rng = np.random.default_rng(heads + kv_heads)
    batch, slots, width = 2, 48, 6
    query = rng.standard_normal((batch, new_tokens, heads, width))
    keys, values = rng.standard_normal((2, batch, slots, kv_heads, width))
    mask = rng.random((batch, new_tokens, slots)) < 0.4
    mask[:, :, 0] = True
    arrays = [jnp.asarray(array, jnp.float32) for array in (query, keys, values)]
    flat = [array.reshape(batch, slots, -1) for array in arrays[1:]]
    found = attend(arrays[0], *flat, jnp.asarray(mask), 0.3, FLOAT32)
    for b, t, n in np.ndindex(batch, new_tokens, heads):
        head = n * kv_heads // heads
        scores = np.where(mask[b, t], keys[b, :, head] @ query[b, t, n] * 0.3, -np.inf)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(found[b, t, n], weights @ values[b, :, head] / weights.sum(), atol=1e-5)


def test_a_query_that_sees_nothing_gets_finite_numbers():
    zeros = jnp.zeros((1, 2, 2, 4)), jnp.ones((1, 8, 8)), jnp.ones((1, 8, 8)), jnp.zeros((1, 2, 8), bool)
    assert np.isfinite(attend(*zeros, 0.5, FLOAT32)).all()


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=2), st.integers(0, 2**32 - 1))
def test_visible_slots_are_the_committed_ones_and_the_ancestors(starts, seed):
    ancestors_BTT = np.random.default_rng(seed).random((2, 3, 3)) < 0.5
    mask_BTS = visible_slots(jnp.array(starts, jnp.int32), jnp.asarray(ancestors_BTT), 12)
    for row, start in enumerate(starts):
        for token in range(3):
            own = {start + other for other in np.flatnonzero(ancestors_BTT[row, token])}
            assert set(np.flatnonzero(mask_BTS[row, token])) == {*range(start), *own}


def test_causal_ancestors_are_all_tokens_before():
    assert causal_ancestors(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("rows", [(1,), (2, 3), (5,)])
@pytest.mark.parametrize("backend", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_products_equal_those_of_numpy(rows, backend):
    """Padding few rows up to what runs fast is not seen, and sums are not rounded to 16 bits."""
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.standard_normal((7, 300)), backend.param_dtype)
    bias = jnp.asarray(rng.standard_normal(7), backend.param_dtype)
    inputs = jnp.asarray(rng.standard_normal((*rows, 300)), backend.param_dtype).astype(backend.compute_dtype)
    expected = np.asarray(inputs, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(product(inputs, kernel, backend), expected, atol=1e-4)
    with_bias = linear(inputs, kernel, bias, backend)
    assert with_bias.dtype == backend.compute_dtype
    np.testing.assert_allclose(with_bias, expected + np.asarray(bias, np.float64), atol=1e-4)


@pytest.mark.parametrize("backend", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_embeddings_are_rows_of_the_table(backend):
    table = jnp.asarray(np.random.default_rng(0).standard_normal((9, 4)), backend.param_dtype)
    found = embed(table, jnp.array([[0, 8, 3], [12, -5, 1]], jnp.int32), backend)
    assert found.dtype == backend.compute_dtype
    expected = np.asarray(table, np.float32)[[[0, 8, 3], [8, 0, 1]]]
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
