"""The retrieval cache holds the chunks that the published rule chooses, and the end of the text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import Scores
from jaxinfer.cache.paged import PagedCache
from jaxinfer.cache.recording import RecordingCache
from jaxinfer.cache.retrieval import create_retrieval_cache
from tests.toys import float32_backend

LAYERS, ROWS, SLOTS, KV_HEADS, GROUPS, WIDTH = 2, 4, 70, 2, 3, 4
CHUNK, BUDGET, RECENT, TAIL = 4, 16, 6, 20
# Too short for any chunk, fewer chunks than the budget, more, and all that the cache has slots for.
HELD_B = np.array([5, 17, 43, 66], np.int32)
BACKEND = float32_backend()


@pytest.fixture(scope="module")
def text():
    """A dense cache of four texts, garbage past their ends, and a query for each layer and row."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH)).astype(np.float32)
    for row, held in enumerate(HELD_B):
        keys[:, row, held:] = values[:, row, held:] = 1e4
    return DenseCache(keys, values), rng.standard_normal((LAYERS, ROWS, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def retrieved(text):
    cache, queries = text
    cache = jax.tree.map(jnp.asarray, cache)
    empty = create_retrieval_cache(cache, BUDGET, TAIL)
    rechosen = jax.jit(lambda *arrays: empty.rechosen(cache, *arrays, CHUNK, RECENT, BACKEND))
    return jax.device_get(rechosen(queries, HELD_B))


def chosen_positions(keys_SI, query_NH, head, held):
    """Choose as the specification says: mean keys, queries of a head's group summed, the first chunk always."""
    num_chunks = max(held - RECENT, 0) // CHUNK
    scores = []
    for chunk in range(num_chunks):
        rows = keys_SI[chunk * CHUNK : (chunk + 1) * CHUNK, head * WIDTH : (head + 1) * WIDTH]
        queries = query_NH[head * GROUPS : (head + 1) * GROUPS]
        scores.append(np.inf if chunk == 0 else float(queries.sum(axis=0) @ rows.mean(axis=0)))
    best = np.argsort(scores)[::-1][: BUDGET // CHUNK]
    return [at for chunk in best for at in range(chunk * CHUNK, (chunk + 1) * CHUNK)]


def test_each_head_of_each_layer_holds_the_chunks_that_its_queries_score_best(text, retrieved):
    cache, queries = text
    assert retrieved.chosen_B.tolist() == [0, 8, 16, 16]
    choices = set()
    for row, held in enumerate(HELD_B):
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                lanes = slice(head * WIDTH, (head + 1) * WIDTH)
                positions = chosen_positions(cache.keys[layer, row], queries[layer, row], head, held)
                choices.add((row, *sorted(positions)))
                for found, source in ((retrieved.keys, cache.keys), (retrieved.values, cache.values)):
                    chosen = found[layer, row, : len(positions), lanes]
                    np.testing.assert_array_equal(chosen, source[layer, row, positions, lanes])
    assert len(choices) > ROWS  # or a choice for all heads at once would pass


def test_the_tail_begins_where_chunks_could_be_chosen_and_holds_the_recent_tokens(text, retrieved):
    cache, _ = text
    assert retrieved.origin_B.tolist() == [0, 8, 36, 60]
    for row, (origin, held) in enumerate(zip(retrieved.origin_B.tolist(), HELD_B)):
        assert held - origin >= min(RECENT, held)
        np.testing.assert_array_equal(
            retrieved.keys[:, row, BUDGET : BUDGET + held - origin], cache.keys[:, row, origin:held]
        )


def test_choosing_that_is_not_due_changes_nothing(text, retrieved):
    cache, queries, retrieved = jax.tree.map(jnp.asarray, (*text, retrieved))
    same = retrieved.rechosen(cache, queries * -1, jnp.asarray(HELD_B) + 1, CHUNK, RECENT, BACKEND, jnp.asarray(False))
    jax.tree.map(np.testing.assert_array_equal, same, retrieved)
    other = retrieved.rechosen(cache, queries * -1, jnp.asarray(HELD_B), CHUNK, RECENT, BACKEND, jnp.asarray(True))
    assert (np.asarray(other.keys) != np.asarray(retrieved.keys)).any()


def test_tokens_are_copied_anew_where_they_stand_in_the_tail(text, retrieved):
    """What drafts wrote over them is undone; positions before the tail are left alone."""
    cache, before = jax.tree.map(jnp.asarray, (text[0], retrieved))
    spoilt = replace(before, keys=before.keys.at[:, :, BUDGET:].add(1), values=before.values + 1)
    positions_BM = jnp.asarray(HELD_B)[:, None] - jnp.arange(16, 0, -1) % 7 - 1
    mended = jax.device_get(spoilt.refreshed(cache, jnp.unique(positions_BM, axis=1)))
    for row, held in enumerate(HELD_B):
        origin = int(retrieved.origin_B[row])
        slots = slice(BUDGET + max(held - 7 - origin, 0), BUDGET + held - origin)
        np.testing.assert_array_equal(mended.keys[:, row, slots], retrieved.keys[:, row, slots])
        np.testing.assert_array_equal(mended.values[:, row, slots], retrieved.values[:, row, slots])
    np.testing.assert_array_equal(mended.keys[:, :, :BUDGET], retrieved.keys[:, :, :BUDGET])


def test_new_tokens_see_the_chunks_and_the_end_of_the_text(text, retrieved):
    """By the attention of each head over exactly those, with two new tokens in a chain."""
    cache, queries = text
    rng = np.random.default_rng(1)
    query_BTNH = rng.standard_normal((ROWS, 2, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    new = rng.standard_normal((2, ROWS, 2, KV_HEADS, WIDTH)).astype(np.float32)
    layout = jax.tree.map(jnp.asarray, retrieved)
    placement = layout.place(jnp.asarray(HELD_B), jnp.tril(jnp.ones((1, 2, 2), bool)))
    arrays = [jnp.asarray(array) for array in (query_BTNH, *new)]
    mixed_BTNH, written = layout.attend(1, placement, *arrays, Scores(WIDTH**-0.5), BACKEND)
    kept = written.keep(jnp.asarray(HELD_B), jnp.asarray([[0, 1]] * ROWS), jnp.full((ROWS,), 2))
    mixed_BTNH, kept = jax.device_get((mixed_BTNH, kept))
    for row, held in enumerate(HELD_B):
        end = BUDGET + held - int(retrieved.origin_B[row])
        np.testing.assert_array_equal(kept.keys[1, row, end : end + 2], new[0, row].reshape(2, -1))
        for head in range(KV_HEADS * GROUPS):
            shared = head // GROUPS
            chosen = chosen_positions(cache.keys[1, row], queries[1, row], shared, held)
            seen = [*chosen, *range(int(retrieved.origin_B[row]), held)]
            lanes = slice(shared * WIDTH, (shared + 1) * WIDTH)
            for token in range(2):
                keys_SH, values_SH = (
                    np.concatenate([held_SI[1, row, seen, lanes], added[row, : token + 1, shared]]).astype(np.float64)
                    for held_SI, added in ((cache.keys, new[0]), (cache.values, new[1]))
                )
                weights_S = np.exp(keys_SH @ query_BTNH[row, token, head] * WIDTH**-0.5)
                expected_H = weights_S @ values_SH / weights_S.sum()
                np.testing.assert_allclose(mixed_BTNH[row, token, head], expected_H, atol=1e-5)


def test_a_recording_cache_attends_as_the_cache_does_and_holds_the_queries(text):
    cache = jax.tree.map(jnp.asarray, text[0])
    rng = np.random.default_rng(2)
    query_BTNH = jnp.asarray(rng.standard_normal((ROWS, 3, KV_HEADS * GROUPS, WIDTH)), jnp.float32)
    keys, values = jnp.asarray(rng.standard_normal((2, ROWS, 3, KV_HEADS, WIDTH)), jnp.float32)
    recording = RecordingCache(cache, jnp.zeros((LAYERS, *query_BTNH.shape)))
    relation = jnp.tril(jnp.ones((1, 3, 3), bool))
    outputs = []
    for layout in (cache, recording):
        placement = layout.place(jnp.asarray(HELD_B), relation)
        mixed, layout = layout.attend(1, placement, query_BTNH, keys, values, Scores(0.5), BACKEND)
        layout = layout.keep(jnp.asarray(HELD_B), jnp.asarray([[0, 2, 2]] * ROWS), jnp.full((ROWS,), 2))
        outputs.append((mixed, layout))
    (plain, expected), (mixed, found) = outputs
    np.testing.assert_array_equal(mixed, plain)
    np.testing.assert_array_equal(found.cache.keys, expected.keys)
    np.testing.assert_array_equal(found.queries_LBTNH[1], query_BTNH)
    assert not np.asarray(found.queries_LBTNH[0]).any()


@pytest.fixture(scope="module")
def on_pages(text):
    """The same texts on pages of 8 slots, in no order."""
    cache, size = text[0], 8
    columns = -(-SLOTS // size)
    table_BX = 1 + np.random.default_rng(1).permutation(ROWS * columns).reshape(ROWS, columns).astype(np.int32)
    pools = []
    for rows_LBSI in (cache.keys, cache.values):
        pool = np.zeros((LAYERS, 1 + ROWS * columns, size, KV_HEADS * WIDTH), np.float32)
        padded = np.pad(rows_LBSI, ((0, 0), (0, 0), (0, columns * size - SLOTS), (0, 0)))
        pool[:, table_BX] = padded.reshape(LAYERS, ROWS, columns, size, -1)
        pools.append(jnp.asarray(pool))
    return PagedCache(*pools, jnp.asarray(table_BX))


def test_pages_give_what_a_dense_cache_gives(text, retrieved, on_pages):
    cache, queries = text
    empty = create_retrieval_cache(on_pages, BUDGET, TAIL)
    rechosen = jax.jit(lambda *arrays: empty.rechosen(on_pages, *arrays, CHUNK, RECENT, BACKEND))
    found = jax.device_get(rechosen(queries, HELD_B))
    jax.tree.map(np.testing.assert_array_equal, found, retrieved)
    slots_BM = np.array([[0, 69], [8, 7], [31, 16], [5, 64]], np.int32)
    dense = jax.tree.map(jnp.asarray, cache)
    for one, other in zip(jax.jit(on_pages.read)(slots_BM), jax.jit(dense.read)(slots_BM)):
        np.testing.assert_array_equal(one, other)


def test_a_table_of_fewer_chunks_than_the_budget_gives_what_there_is(text, retrieved, on_pages):
    """As the first window of a short text has in an engine."""
    short = replace(on_pages, table_BX=on_pages.table_BX[1:2, :1])
    empty = create_retrieval_cache(short, BUDGET, TAIL)
    held_1 = jnp.array([8], jnp.int32)
    found = jax.jit(lambda *arrays: empty.rechosen(short, *arrays, CHUNK, 0, BACKEND))(text[1][:, 1:2], held_1)
    assert found.chosen_B.tolist() == [8]
    first = np.asarray(text[0].keys)[:, 1, :CHUNK]
    np.testing.assert_array_equal(np.asarray(found.keys)[:, 0, :CHUNK], first)


def test_queries_of_texts_on_pages_are_recorded(on_pages):
    """Past a page's length too."""
    rng = np.random.default_rng(2)
    query_BTNH = rng.standard_normal((ROWS, 1, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    new_BTKH = rng.standard_normal((ROWS, 1, KV_HEADS, WIDTH)).astype(np.float32)

    def record(query_BTNH, new_BTKH):
        recording = RecordingCache(on_pages, jnp.zeros((LAYERS, *query_BTNH.shape)))
        placement = recording.place(jnp.asarray(HELD_B), jnp.ones((1, 1, 1), bool))
        _, after = recording.attend(1, placement, query_BTNH, new_BTKH, new_BTKH, Scores(0.5), BACKEND)
        return after.queries_LBTNH

    np.testing.assert_array_equal(jax.jit(record)(query_BTNH, new_BTKH)[1], query_BTNH)
