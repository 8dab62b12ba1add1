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
from jaxinfer.ops.cpu_kernels.attention import Order, attend_to_seen, attends
from jaxinfer.ops.cpu_kernels.attention_code import BLOCK, CHUNK, attention_module, scratch_numbers
from jaxinfer.ops.rows_in_bytes import row_lanes, to_bytes, to_numbers
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, beside_a_guard, drawn, exact
from tests.toys import float32_backend

attend_by_xla = jax.jit(attend_to_seen, static_argnames="softcap")


@functools.cache
def attention_calls(vectors, dtype):
    return Calls(attention_module(vectors, dtype))


def operands_of(query, keys, values, layer, mask, softcap=0.0, sinks=None):
    """Return what XLA gives to the kernel: after queries and slots a mask, the slots that tokens see, and an order."""
    batch, heads, group, tokens, numbers = query.shape
    extent = mask.shape[2]
    mask = mask | ~mask.any(axis=2, keepdims=True)
    padded = np.pad(mask, ((0, 0), (0, 0), (0, -extent % CHUNK))).astype(np.int8)
    ranges = [[np.flatnonzero(seen)[[0, -1]] + (0, 1) for seen in row] for row in mask]
    walk = np.tile(np.array([0, 0, extent], np.int32), (batch, 1))
    query_IXH = query.reshape(batch * heads, group * tokens, numbers)
    table, cap = np.arange(batch, dtype=np.int32)[:, None], np.array([softcap], np.float32)
    return (
        query_IXH, query_IXH, np.array(layer, np.int32), keys, values, table, padded, np.array(ranges, np.int32), walk,
        cap, np.full(heads * group, -np.inf, np.float32) if sinks is None else sinks.reshape(-1),
    )  # fmt: skip


def attend_directly(query, keys, values, layer, mask, softcap=0.0, vectors=HOST, sink_logits_CR=None):
    """Call the kernel as XLA does; it is compiled once for all shapes, where XLA compiles a program for each."""
    operands = operands_of(query, keys, values, layer, mask, softcap, sink_logits_CR)
    shape, slots = operands[0].shape, operands[6].shape[2]
    shapes = shape, (scratch_numbers(*shape, slots, vectors),)
    return attention_calls(vectors, keys.dtype.name).call(operands, shapes)[0].reshape(query.shape)


def check_attention(
    attend, rng, batch, heads, group, tokens, numbers, extent, spare=(0, 0), layers=1, layer=0, softcap=0.0, sinks=False
):
    query = drawn(rng, (batch, heads, group, tokens, numbers))
    shape = layers, batch, extent + spare[0], heads * numbers + spare[1]
    keys, values = drawn(rng, shape), drawn(rng, shape)
    mask = rng.random((batch, tokens, extent)) < 0.6
    for row in mask:
        first, last = sorted(rng.integers(0, extent, 2))
        # Later tokens see later slots, as a prompt's do.
        lasts = np.sort(rng.integers(first, last + 1, (tokens, 1)), axis=0)
        row &= (np.arange(extent) >= first) & (np.arange(extent) <= lasts)
        row[:, first] = True
    assert attends("float32", numbers)
    # Some above all scores, some far below.
    sinks = drawn(rng, (heads, group)) * 9 if sinks else None
    found = attend(query, keys, values, layer, mask, softcap=softcap, sink_logits_CR=sinks)
    of_slots = [
        exact(stack)[layer, :, :extent, : heads * numbers].reshape(batch, extent, heads, numbers)
        for stack in (keys, values)
    ]
    scores = np.einsum("bcrth,bsch->bcrts", exact(query), of_slots[0])
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    scores = np.where(mask[:, None, None], scores, -np.inf)
    totals = np.exp(scores).sum(-1, keepdims=True) + (0 if sinks is None else np.exp(exact(sinks))[..., None, None])
    expected = np.einsum("bcrts,bsch->bcrth", np.exp(scores) / totals, of_slots[1])
    np.testing.assert_allclose(found, expected, atol=2e-5)


any_shape = settings(derandomize=True, max_examples=25, deadline=None)
attention_of_any_shape = given(
    st.tuples(
        *[st.integers(1, 3)] * 3,
        st.one_of(st.integers(1, 9), st.sampled_from([BLOCK, 2 * BLOCK + 1])),
        st.one_of(st.integers(1, 24), st.sampled_from([48, 64, 80])),
        st.integers(1, 3 * CHUNK + 1),
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
    st.sampled_from([0.0, 2.5]),
    st.booleans(),
)


def check_any_attention(attend, shape, spare, layer, softcap=0.0, sinks=False):
    check_attention(attend, np.random.default_rng(shape[-1]), *shape, spare, 3, layer, softcap, sinks)


@any_shape
@attention_of_any_shape
def test_attention_of_any_shape(shape, spare, layer, softcap, sinks):
    check_any_attention(attend_directly, shape, spare, layer, softcap, sinks)


@pytest.mark.slow
@any_shape
@attention_of_any_shape
def test_attention_of_any_shape_by_xla(shape, spare, layer, softcap, sinks):
    check_any_attention(attend_by_xla, shape, spare, layer, softcap, sinks)


@pytest.mark.parametrize(("tokens", "extent"), [(3, 2 * CHUNK + 5), (2 * BLOCK, CHUNK)])
def test_xla_calls_the_kernel(tokens, extent):
    check_any_attention(attend_by_xla, (2, 3, 2, tokens, 48, extent), (1, 8), 1, sinks=True)


def in_bytes(numbers_LBSF, heads, dtype):
    """Return rows in bytes, and the numbers that these stand for."""
    width = numbers_LBSF.shape[3] // heads
    lanes = row_lanes(heads, width)

    @jax.jit
    def convert(numbers_BSKH):
        rows = to_bytes(numbers_BSKH, dtype, lanes, 1)
        return rows, to_numbers(rows, heads, width, 1, "float32")

    layers = [convert(layer.reshape(*layer.shape[:2], heads, width)) for layer in numbers_LBSF]
    return [np.stack(each) for each in zip(*layers)]


@pytest.mark.parametrize(
    ("dtype", "vectors"), [("int8", HOST), ("uint8", HOST), *(("int8", each) for each in SMALLER[:2])]
)
def test_rows_in_bytes_are_read_as_the_numbers_that_they_stand_for(dtype, vectors):
    """And nothing behind the last row is read."""
    for tokens, numbers, extent in ((3, 24, 300), (BLOCK + 5, 80, 140)):
        rng = np.random.default_rng(tokens)
        query, mask = drawn(rng, (2, 3, 2, tokens, numbers)), rng.random((2, tokens, extent)) < 0.6
        held = [in_bytes(drawn(rng, (2, 2, extent, 3 * numbers)), 3, dtype) for _ in range(2)]
        expected = attend_directly(query, *(each[1] for each in held), 1, mask, vectors=vectors)
        rows = [beside_a_guard(each[0], at_end=True) for each in held]
        found = attend_directly(query, *rows, 1, mask, vectors=vectors)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        few = attend_directly(query[..., 1:2, :], *rows, 1, mask[:, 1:2], vectors=vectors)
        np.testing.assert_array_equal(few, found[..., 1:2, :])


@pytest.mark.skipif("float16" not in HOST.dtypes, reason="the processor does not widen float16")
@pytest.mark.parametrize("vectors", [HOST, *SMALLER[:2]])
def test_float16_is_read_as_the_float32_that_it_is(vectors):
    """In every bit, whether a head fills whole vectors or not; and nothing past the last number is read."""
    for tokens, numbers, extent in ((1, 64, 300), (3, 24, 170), (BLOCK + 5, 80, 140)):
        rng = np.random.default_rng(tokens)
        query, mask = drawn(rng, (2, 3, 2, tokens, numbers)), rng.random((2, tokens, extent)) < 0.6
        keys, values = (drawn(rng, (2, 2, extent, 3 * numbers), "float16") for _ in range(2))
        wide = (each.astype(np.float32) for each in (keys, values))
        expected = attend_directly(query, *wide, 1, mask, 2.5, vectors)
        guarded = (beside_a_guard(each, at_end=True) for each in (keys, values))
        np.testing.assert_array_equal(attend_directly(query, *guarded, 1, mask, 2.5, vectors), expected)


def test_xla_calls_the_kernel_of_bytes():
    rng = np.random.default_rng(5)
    query, mask = drawn(rng, (2, 3, 2, 4, 48)), rng.random((2, 4, 150)) < 0.6
    (keys, _), (values, _) = (in_bytes(drawn(rng, (1, 2, 150, 144)), 3, "int8") for _ in range(2))
    found = attend_by_xla(query, keys, values, 0, mask)
    np.testing.assert_array_equal(found, attend_directly(query, keys, values, 0, mask))
    with pytest.raises(ValueError, match="do not fit"):
        attend_by_xla(query, keys[..., :144], values[..., :144], 0, mask)


@POOLS
def test_whatever_the_pool_does_attention_is_whole_and_records_freed(pool):
    rng = np.random.default_rng(12)
    calls = Calls(attention_module(HOST), pool, threads=5)
    for tokens, slots in itertools.product((1, 6, BLOCK), (CHUNK, 5 * CHUNK)):
        query = rng.standard_normal((2, 2, 2, tokens, 32), dtype=np.float32)
        keys, values = rng.standard_normal((2, 3, 2, slots, 72), dtype=np.float32)
        mask = np.ones((2, tokens, slots), bool)
        mask[0, :, 100:] = False
        operands = operands_of(query, keys, values, 1, mask)
        shape = operands[0].shape
        found = calls.call(operands, (shape, (scratch_numbers(*shape, slots, HOST),)))[0].reshape(2, 2, -1, 32)
        for row, last in enumerate((100, slots)):
            of_slots = [stack[1, row, :last, :64].reshape(last, 2, 32) for stack in (keys, values)]
            scores = np.einsum("cxh,sch->cxs", query[row].reshape(2, -1, 32), of_slots[0])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("cxs,sch->cxh", weights / weights.sum(-1, keepdims=True), of_slots[1])
            np.testing.assert_allclose(found[row], expected, atol=1e-4)
    calls.finish()


def test_a_query_has_the_same_bits_among_any_others_and_in_a_longer_cache():
    rng = np.random.default_rng(9)
    tokens = 3 * BLOCK + 5
    query, keys, values = drawn(rng, (3, 2, 3, tokens, 40)), drawn(rng, (1, 3, 700, 80)), drawn(rng, (1, 3, 700, 80))
    mask = rng.random((3, tokens, 700)) < 0.5
    mask[:, :, 500:] = mask[1, :, 300:] = mask[2, :, :180] = False
    attend = functools.partial(attend_directly, sink_logits_CR=drawn(rng, (2, 3)))
    whole = attend(query, keys, values, 0, mask)
    for few in (slice(0, 1), slice(3, 4), slice(2, 7), slice(5, 5 + BLOCK)):
        found = attend(query[..., few, :], keys, values, 0, mask[:, few])
        np.testing.assert_array_equal(found, whole[..., few, :])
    for row in range(3):
        part = slice(row, row + 1)
        alone = attend(query[part], keys[:, part, :500], values[:, part, :500], 0, mask[part, :, :500])
        np.testing.assert_array_equal(alone, whole[part])


@pytest.mark.parametrize("tokens", [1, 7, BLOCK + 1])
def test_what_lies_between_the_slots_that_a_query_sees_changes_no_bit(tokens):
    """A node of a tree sees slots with others between them, where plain decoding has written them side by side."""
    rng = np.random.default_rng(tokens)
    query, keys, values = drawn(rng, (1, 2, 2, tokens, 24)), drawn(rng, (1, 1, 420, 48)), drawn(rng, (1, 1, 420, 48))
    mask = rng.random((1, tokens, 420)) < rng.random((1, tokens, 1))
    mask[..., 17] = True
    found = attend_directly(query, keys, values, 0, mask)
    for token in range(tokens):
        seen = np.flatnonzero(mask[0, token])
        side_by_side = [stack[:, :, seen] for stack in (keys, values)]
        one = attend_directly(query[..., token : token + 1, :], *side_by_side, 0, np.ones((1, 1, len(seen)), bool))
        np.testing.assert_array_equal(one[..., 0, :], found[..., token, :])


@pytest.mark.parametrize("tokens", [1, 6, BLOCK + 1])
@pytest.mark.parametrize("size", [8, 64, 2 * CHUNK])
def test_pages_change_no_bit_wherever_they_lie(size, tokens):
    """Nor do pages past the last slot that is seen, which a table may not even have."""
    rng = np.random.default_rng(size)
    columns = -(-300 // size)
    slots = size * columns
    query, (keys, values) = drawn(rng, (2, 2, 1, tokens, 32)), drawn(rng, (2, 3, 2, slots, 72))
    mask = rng.random((2, tokens, 300)) < 0.6
    mask[0, :, 150:] = mask[1, :, :70] = False
    expected = attend_directly(query, keys, values, 1, mask)
    pages = rng.permutation(3 * columns).reshape(3, columns)[:2]
    pools = [np.full((3, 3 * columns, size, 72), np.nan, np.float32) for _ in range(2)]
    for pool, dense in zip(pools, (keys, values)):
        pool[:, pages] = dense.reshape(3, 2, columns, size, 72)
    pages[0, -(-150 // size) :] = -5
    pages[1, : 70 // size] = 10**6
    found = attend_by_xla(query, *pools, 1, mask, table_BX=pages.astype(np.int32))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("near", "turns", "end"), [(0, (100, 299), 300), (4, (4, 150), 256), (3, (280, 7), 290)])
def test_a_ring_changes_no_bit_wherever_it_begins(near, turns, end):
    """Sinks, a ring that begins at a slot of each row, and what stands beside it: as if in the sequence's order."""
    rng = np.random.default_rng(end)
    arrays = drawn(rng, (2, 2, 1, 5, 32)), drawn(rng, (1, 2, 300, 64)), drawn(rng, (1, 2, 300, 64))
    query, keys, values = arrays
    near_query, mask = drawn(rng, query.shape), rng.random((2, 5, 300)) < 0.7

    @jax.jit
    def attend(query, keys, values, mask, near_query, turn_B):
        order = Order(near, turn_B, end)
        return attend_to_seen(query, keys, values, 0, mask, near_query_BCRTH=near_query, order=order)

    found = np.asarray(attend(query, keys, values, mask, near_query, np.array(turns, np.int32)))
    for row, turn in enumerate(turns):
        order = np.r_[:near, turn:end, near:turn, end:300]
        part = slice(row, row + 1)
        straight = keys[:, part, order], values[:, part, order], mask[part][..., order]
        in_order = attend(query[part], *straight, near_query[part], np.array([near], np.int32))
        np.testing.assert_array_equal(found[part], in_order)
    scores = np.einsum("bcrth,bsch->bcrts", exact(query), exact(keys[0]).reshape(2, 300, 2, 32))
    near_keys = exact(keys[0, :, :near]).reshape(2, near, 2, 32)
    scores[..., :near] = np.einsum("bcrth,bsch->bcrts", exact(near_query), near_keys)
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bcrts,bsch->bcrth", weights, exact(values[0]).reshape(2, 300, 2, 32))
    np.testing.assert_allclose(found, expected, atol=2e-5)


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


@pytest.mark.parametrize("tokens", [1, BLOCK + 1])
def test_slots_outside_of_all_that_is_seen_are_not_read(tokens):
    """Not even those that share a vector with the first or the last one that is."""
    rng = np.random.default_rng(14)
    query, (keys, values) = drawn(rng, (1, 1, 1, tokens, 8)), drawn(rng, (2, 1, 1, 300, 8))
    mask = np.zeros((1, tokens, 300), bool)
    mask[..., 133:205] = True
    expected = attend_by_xla(query, keys, values, 0, mask)
    for array in (keys, values):
        array[:, :, :133] = array[:, :, 205:] = np.nan
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
        attend_by(backend, sink_query, query, keys, values, mask) for backend in (own, replace(own, cpu_kernels=False))
    ]
    np.testing.assert_allclose(*by_both, atol=1e-5)


def test_attention_to_keys_and_values_of_two_dtypes_is_left_to_xla():
    rng = np.random.default_rng(14)
    query, keys, values = drawn(rng, (1, 2, 4, 32)), drawn(rng, (1, 40, 64)), drawn(rng, (1, 40, 64), "bfloat16")
    mask = np.ones((1, 2, 40), bool)
    own, by_xla = (
        jax.jit(attend, static_argnums=(4, 5))(query, keys, values, mask, 0.1, backend)
        for backend in (float32_backend(), replace(float32_backend(), cpu_kernels=False))
    )
    np.testing.assert_allclose(own, by_xla, atol=1e-5)
