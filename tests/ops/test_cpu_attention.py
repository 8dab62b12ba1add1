"""The CPU's own attention: against NumPy and XLA, whatever is hidden, whoever else asks."""

import functools
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.attention import Sinks, attend
from jaxinfer.ops.cpu_kernels.attention import attend_to_seen, attends
from jaxinfer.ops.cpu_kernels.attention_code import CHUNK, attention_module, scratch_numbers
from tests.ops.foreign_calls import HOST, POOLS, Calls, drawn, exact
from tests.toys import float32_backend

attend_by_xla = jax.jit(attend_to_seen)


@functools.cache
def attention_calls(vectors):
    return Calls(attention_module(vectors))


def attend_directly(query, keys, values, layer, mask, vectors=HOST):
    """Call the kernel as XLA does; it is compiled once for all shapes, where XLA compiles a program for each."""
    batch, heads, group, tokens, numbers = query.shape
    extent = mask.shape[2]
    hidden = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
    hidden = np.pad(hidden, ((0, 0), (0, 0), (0, -extent % CHUNK)))
    ranges = [np.flatnonzero((row | ~row.any(axis=1, keepdims=True)).any(axis=0))[[0, -1]] + (0, 1) for row in mask]
    items, rows = batch * heads, group * tokens
    shapes = (items, rows, numbers), (items * hidden.shape[2] // CHUNK, scratch_numbers(rows, numbers))
    arguments = query.reshape(shapes[0]), np.array(layer, np.int32), keys, values, hidden, np.array(ranges, np.int32)
    return attention_calls(vectors).call(arguments, shapes)[0].reshape(query.shape)


def check_attention(attend, rng, batch, heads, group, tokens, numbers, extent, spare=(0, 0), layers=1, layer=0):
    query = drawn(rng, (batch, heads, group, tokens, numbers))
    shape = layers, batch, extent + spare[0], heads * numbers + spare[1]
    keys, values = drawn(rng, shape), drawn(rng, shape)
    mask = rng.random((batch, tokens, extent)) < 0.6
    for row in mask:
        first, last = sorted(rng.integers(0, extent, 2))
        row[:, :first] = row[:, last + 1 :] = False
        row[:, first] = True
    assert attends("float32", numbers)
    found = attend(query, keys, values, layer, mask)
    of_slots = [
        exact(stack)[layer, :, :extent, : heads * numbers].reshape(batch, extent, heads, numbers)
        for stack in (keys, values)
    ]
    scores = np.einsum("bcrth,bsch->bcrts", exact(query), of_slots[0])
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bcrts,bsch->bcrth", weights / weights.sum(-1, keepdims=True), of_slots[1])
    np.testing.assert_allclose(found, expected, atol=2e-5)


any_shape = settings(derandomize=True, max_examples=25, deadline=None)
attention_of_any_shape = given(
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 9), st.integers(1, 5), st.integers(1, 3 * CHUNK + 1)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)


def check_any_attention(attend, shape, spare, layer):
    batch, heads, group, tokens, vectors, extent = shape
    rng = np.random.default_rng(extent)
    check_attention(attend, rng, batch, heads, group, tokens, vectors * HOST.lanes, extent, spare, 3, layer)


@any_shape
@attention_of_any_shape
def test_attention_of_any_shape(shape, spare, layer):
    check_any_attention(attend_directly, shape, spare, layer)


@pytest.mark.slow
@any_shape
@attention_of_any_shape
def test_attention_of_any_shape_by_xla(shape, spare, layer):
    check_any_attention(attend_by_xla, shape, spare, layer)


@pytest.mark.parametrize(("tokens", "extent"), [(3, 2 * CHUNK + 5), (7, CHUNK)])
def test_xla_calls_the_kernel(tokens, extent):
    check_any_attention(attend_by_xla, (2, 3, 2, tokens, 3, extent), (1, 8), 1)


@POOLS
def test_whatever_the_pool_does_attention_is_whole_and_records_freed(pool):
    rng = np.random.default_rng(12)
    calls = Calls(attention_module(HOST), pool, threads=5)
    for tokens, slots in itertools.product((1, 6), (CHUNK, 5 * CHUNK)):
        query_IXH = rng.standard_normal((4, 2 * tokens, 32), dtype=np.float32)
        keys, values = rng.standard_normal((2, 3, 2, slots, 72), dtype=np.float32)
        hidden_BTP = np.zeros((2, tokens, slots), np.float32)
        hidden_BTP[:, :, 100:] = np.finfo(np.float32).min
        hidden_BTP[1, :, :slots] = 0
        ranges = np.array([[0, 100], [0, slots]], np.int32)
        shapes = query_IXH.shape, (4 * slots // CHUNK, scratch_numbers(2 * tokens, 32))
        arguments = query_IXH, np.array(1, np.int32), keys, values, hidden_BTP, ranges
        found = calls.call(arguments, shapes)[0].reshape(2, 2, 2 * tokens, 32)
        for row, (_, last) in enumerate(ranges):
            of_slots = [stack[1, row, :last, :64].reshape(last, 2, 32) for stack in (keys, values)]
            scores = np.einsum("cxh,sch->cxs", query_IXH.reshape(2, 2, -1, 32)[row], of_slots[0])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("cxs,sch->cxh", weights / weights.sum(-1, keepdims=True), of_slots[1])
            np.testing.assert_allclose(found[row], expected, atol=1e-4)
    calls.finish()


def test_a_query_has_the_same_results_among_any_others_and_in_a_longer_cache():
    rng = np.random.default_rng(9)
    query, keys, values = drawn(rng, (3, 2, 3, 7, 64)), drawn(rng, (1, 3, 700, 128)), drawn(rng, (1, 3, 700, 128))
    mask = rng.random((3, 7, 700)) < 0.5
    mask[:, :, 500:] = mask[1, :, 300:] = mask[2, :, :180] = False
    whole = np.asarray(attend_by_xla(query, keys, values, 0, mask))
    for tokens in (slice(0, 1), slice(3, 4), slice(2, 7)):
        np.testing.assert_array_equal(
            attend_by_xla(query[..., tokens, :], keys, values, 0, mask[:, tokens]), whole[..., tokens, :]
        )
    for row in range(3):
        part = slice(row, row + 1)
        alone = attend_by_xla(query[part], keys[:, part, :500], values[:, part, :500], 0, mask[part, :, :500])
        np.testing.assert_array_equal(alone, whole[part])


def few_queries(seed):
    """Return queries, keys and values of one shape, so that one program attends."""
    rng = np.random.default_rng(seed)
    return drawn(rng, (2, 1, 1, 3, 32)), drawn(rng, (1, 2, 300, 32)), drawn(rng, (1, 2, 300, 32))


def test_a_query_that_sees_nothing_gets_the_mean_of_all_and_spoils_no_other():
    query, keys, values = few_queries(10)
    mask = np.zeros((2, 3, 300), bool)
    mask[0, ::2, 60:90] = True
    found = attend_by_xla(query, keys, values, 0, mask)
    means = values[0].mean(1)
    np.testing.assert_allclose(found[0, 0, 0, 1], means[0], atol=1e-5)
    np.testing.assert_allclose(found[1, 0, 0], np.tile(means[1], (3, 1)), atol=1e-5)
    mask[0, 1] = mask[0, 0]
    seen = attend_by_xla(query, keys, values, 0, mask)
    np.testing.assert_array_equal(found[0, 0, 0, ::2], seen[0, 0, 0, ::2])


@pytest.mark.parametrize("key", [np.nan, np.inf, -np.inf, 3e38])
def test_hidden_keys_count_for_nothing_whatever_they_are(key):
    query, keys, values = few_queries(13)
    mask = np.ones((2, 3, 300), bool)
    mask[..., 20] = mask[:, 0, 128:] = False
    expected = attend_by_xla(query, keys, values, 0, mask)
    keys[0, :, 20] = key
    np.testing.assert_array_equal(attend_by_xla(query, keys, values, 0, mask), expected)


def test_great_and_small_scores():
    """Weights far apart neither overflow nor become nothing where they are all small."""
    query, keys, values = few_queries(11)
    for size in (1e-3, 30.0, 1e4):
        sized = (query * size).astype(np.float32)
        scores = np.einsum("bth,bsh->bts", exact(sized)[:, 0, 0], exact(keys)[0])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("bts,bsh->bth", weights / weights.sum(-1, keepdims=True), exact(values)[0])
        found = attend_by_xla(sized, keys, values, 0, np.ones((2, 3, 300), bool))[:, 0, 0]
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, size))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_that_of_xla(softcap, with_sinks):
    rng = np.random.default_rng(4)
    own = float32_backend()
    query, keys, values = drawn(rng, (2, 3, 6, 64)), drawn(rng, (2, 40, 128)), drawn(rng, (2, 40, 128))
    sink_query = drawn(rng, (2, 3, 6, 64))
    mask = rng.random((2, 3, 40)) < 0.5

    @functools.partial(jax.jit, static_argnums=0)
    def attend_by(backend, sink_query, *arrays):
        return attend(*arrays, 0.125, backend, softcap, Sinks(sink_query, 4) if with_sinks else None)

    by_both = [
        attend_by(backend, sink_query, query, keys, values, mask) for backend in (own, replace(own, kernel_rows=0))
    ]
    np.testing.assert_allclose(*by_both, atol=1e-5)


def test_attention_to_keys_and_values_of_two_dtypes_is_left_to_xla():
    rng = np.random.default_rng(14)
    query, keys, values = drawn(rng, (1, 2, 4, 32)), drawn(rng, (1, 40, 64)), drawn(rng, (1, 40, 64), "bfloat16")
    mask = np.ones((1, 2, 40), bool)
    own, by_xla = (
        jax.jit(attend, static_argnums=(4, 5))(query, keys, values, mask, 0.1, backend)
        for backend in (float32_backend(), replace(float32_backend(), kernel_rows=0))
    )
    np.testing.assert_allclose(own, by_xla, atol=1e-5)
