"""The laws of `jaxinfer.cache.interface`, held by every layout through random sequences of draft trees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.dense import DenseCache, create_dense_cache
from jaxinfer.cache.interface import Cache, Scores
from jaxinfer.cache.paged import PagedCache, create_paged_cache
from jaxinfer.cache.retrieval import RetrievalCache
from jaxinfer.cache.retrieving import RetrievingCache
from jaxinfer.cache.ring import RingCache, create_ring_cache, ring_capacity
from jaxinfer.cache.streaming import StreamingCache
from jaxinfer.decoding.trees.tree import ancestors
from jaxinfer.ops.masks import Chunk, Window, causal_ancestors, widest
from tests.toys import float32_backend

LAYERS, ROWS, SLOTS, NODES, KV_HEADS, WIDTH = 2, 2, 16, 4, 2, 4
GROUPS = 2
SCALE = WIDTH**-0.5
BACKEND = float32_backend()
GARBAGE = 1e4

trees = st.tuples(*[st.integers(0, max(node - 1, 0)) for node in range(NODES)])
steps = st.lists(st.tuples(*[st.tuples(trees, st.integers(0, NODES - 1)) for _ in range(ROWS)]), min_size=1, max_size=4)
few = settings(derandomize=True, max_examples=15, deadline=None)


@dataclass(frozen=True)
class Layout:
    """A cache with room for SLOTS tokens or the least number of slots that its laws allow, and what a query sees."""

    create: Callable[[], Cache]
    window: Window = SLOTS
    sinks: int = 0

    def seen(self, length):
        """Return which of the first ``length`` tokens the last of them sees."""
        last = length - 1
        first = last - last % self.window.size if isinstance(self.window, Chunk) else length - self.window
        return np.array([at for at in range(length) if at < self.sinks or at >= first], np.int32)

    def needed(self, length):
        """Return which of ``length`` committed tokens a later one sees: one fewer, as it sees itself."""
        return np.array([at for at in self.seen(length + 1) if at < length], np.int32)

    def slots(self, positions):
        cache = self.create()
        if isinstance(cache, RetrievalCache):
            return cache.budget + positions
        if isinstance(cache, StreamingCache):
            return np.asarray(cache.slots(jnp.asarray(positions)))
        return positions % cache.capacity if isinstance(cache, RingCache) else positions

    def held(self, cache, row, positions):
        """Return a row's keys and values of positions, ``[2, L, len(positions), K*H]``."""
        if isinstance(cache, RetrievingCache):
            heads = slice(row * KV_HEADS, (row + 1) * KV_HEADS)
            return np.stack([np.moveaxis(buffer[:, heads, positions], 1, 2) for buffer in buffers(cache)])
        if isinstance(cache, PagedCache):
            table_X, size = np.asarray(cache.table_BX[row]), cache.page_size
            return np.stack([buffer[:, table_X[positions // size], positions % size] for buffer in buffers(cache)])
        return np.stack([buffer[:, row, self.slots(positions)] for buffer in buffers(cache)])


def buffers(cache):
    return np.asarray(cache.keys), np.asarray(cache.values)


def dense(window=None) -> DenseCache:
    return create_dense_cache(LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH, BACKEND, window)


def ring(window) -> RingCache:
    """Return a ring that has not one slot to spare."""
    shape = (LAYERS, ROWS, widest(window) + NODES - 1, KV_HEADS * WIDTH)
    return RingCache(jnp.zeros(shape), jnp.zeros(shape), window)


def streaming(sinks, window) -> StreamingCache:
    """Return a streaming cache that has not one slot to spare."""
    shape = (LAYERS, ROWS, sinks + window + NODES - 1, KV_HEADS * WIDTH)
    return StreamingCache(jnp.zeros(shape), jnp.zeros(shape), sinks, window)


def retrieval(budget) -> RetrievalCache:
    """Return a retrieval cache that has retrieved nothing: its tail is to be what a dense cache is."""
    shape, zero_B = (LAYERS, ROWS, budget + SLOTS, KV_HEADS * WIDTH), jnp.zeros((ROWS,), jnp.int32)
    return RetrievalCache(jnp.zeros(shape), jnp.zeros(shape), zero_B, zero_B, budget)


def retrieving(budget, recent) -> RetrievingCache:
    """Return a cache with a budget for every chunk of 4 slots, so that every token is read."""
    shape, means = (LAYERS, ROWS * KV_HEADS, SLOTS, WIDTH), (LAYERS, ROWS * KV_HEADS, SLOTS // 4, WIDTH)
    return RetrievingCache(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(means), KV_HEADS, budget, 4, recent)


def paged(window=None) -> PagedCache:
    """Return a cache whose rows have their pages in no order, with one that is nobody's between them."""
    table_BX = np.array([[7, 2, 9, 3], [1, 8, 6, 4]], np.int32)
    return create_paged_cache(LAYERS, 10, SLOTS // 4, table_BX, KV_HEADS * WIDTH, BACKEND, window)


def filled_with_garbage(cache: Cache) -> Cache:
    """Return a cache whose keys and values mean nothing."""
    return jax.tree.map(lambda leaf: leaf + GARBAGE if leaf.ndim == 4 else leaf, cache)


LAYOUTS: Mapping[str, Layout] = {
    "dense": Layout(dense),
    "dense-window-3": Layout(lambda: dense(3), 3),
    "paged": Layout(paged),
    "paged-window-3": Layout(lambda: paged(3), 3),
    "ring-window-1": Layout(lambda: ring(1), 1),
    "ring-window-3": Layout(lambda: ring(3), 3),
    "ring-window-7": Layout(lambda: ring(7), 7),
    "dense-chunk-3": Layout(lambda: dense(Chunk(3)), Chunk(3)),
    "paged-chunk-4": Layout(lambda: paged(Chunk(4)), Chunk(4)),
    "ring-chunk-5": Layout(lambda: ring(Chunk(5)), Chunk(5)),
    "retrieval-tail": Layout(lambda: retrieval(6)),
    "retrieving-all": Layout(lambda: retrieving(16, NODES)),
    "streaming-0-4": Layout(lambda: streaming(0, 4), 4),
    "streaming-2-3": Layout(lambda: streaming(2, 3), 3, 2),
    "streaming-5-6": Layout(lambda: streaming(5, 6), 6, 5),
}


# Of windows and sinks the ordinary run has one of each kind; chunks and what is retrieved are in the wide run.
OTHER_SIZES = ("ring-window-1", "ring-window-7", "paged-window-3", "streaming-0-4", "streaming-5-6")
USUAL = ("dense", "dense-window-3", "paged", "ring-window-3", "retrieval-tail", "streaming-2-3")


def marks_of(name):
    if name in USUAL:
        return ()
    return pytest.mark.exhaustive if name in OTHER_SIZES else pytest.mark.slow


every_layout = pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=marks_of(name)) for name, layout in LAYOUTS.items()],
)


def path_to(parents, node):
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def scores_of(cache, layer):
    """Return the rule of a layer's scores: those of every second one have a sink for each head, where that is taken."""
    has_sinks = layer % 2 and not isinstance(cache, RetrievingCache)
    return Scores(SCALE, sink_logits_N=jnp.linspace(-2.0, 3.0, KV_HEADS * GROUPS) if has_sinks else None)


def attend_plainly(query_NH, keys_SKH, values_SKH, sinks_N):
    """Attention of one token over the tokens that it sees, head by head, in float64."""
    output = np.zeros(query_NH.shape)
    for head, query_H in enumerate(query_NH.astype(np.float64)):
        scores_S = keys_SKH[:, head // GROUPS] @ query_H * SCALE
        weights_S, sink = np.exp(scores_S), 0 if sinks_N is None else np.exp(np.float64(sinks_N[head]))
        output[head] = weights_S @ values_SKH[:, head // GROUPS] / (weights_S.sum() + sink)
    return output


@jax.jit
def write_and_attend(cache, start_B, parents_BM, keys_LBMKH, values_LBMKH, query_BMNH):
    placement = cache.place(start_B, ancestors(parents_BM))
    outputs = []
    for layer in range(LAYERS):
        new = keys_LBMKH[layer], values_LBMKH[layer]
        mixed_BMNH, cache = cache.attend(layer, placement, query_BMNH, *new, scores_of(cache, layer), BACKEND)
        outputs.append(mixed_BMNH)
    return cache, jnp.stack(outputs)


keep = jax.jit(lambda cache, *path: cache.keep(*path))


@every_layout
@few
@given(steps, st.integers(0, 2**32 - 1))
def test_trees_see_what_was_kept_and_their_own_ancestors(layout, steps, seed):
    """Each step writes a tree in each row, attends from all its nodes, and keeps the path to one of them.

    The cache begins full of garbage, so whatever stands past a row's length would show.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    empty = layout.create()
    assert isinstance(empty, Cache)
    cache = filled_with_garbage(empty)
    kept = np.zeros((2, LAYERS, ROWS, 0, KV_HEADS, WIDTH), np.float32)
    kept = [[kept[:, layer, row] for row in range(ROWS)] for layer in range(LAYERS)]  # [layer][row]: [2, S, K, H]
    for rows in steps:
        start_B = np.array([kept[0][row].shape[1] for row in range(ROWS)], np.int32)
        parents_BM = np.array([tree for tree, _ in rows], np.int32)
        keys, values = (normal(LAYERS, ROWS, NODES, KV_HEADS, WIDTH) for _ in range(2))
        query_BMNH = normal(ROWS, NODES, KV_HEADS * GROUPS, WIDTH)
        cache, output_LBMNH = write_and_attend(cache, start_B, parents_BM, keys, values, query_BMNH)
        paths_BM = np.zeros((ROWS, NODES), np.int32)
        counts_B = np.zeros(ROWS, np.int32)
        for row, (tree, last) in enumerate(rows):
            for layer in range(LAYERS):
                new = np.stack([keys[layer, row], values[layer, row]])
                for node in range(NODES):
                    seen = np.concatenate([kept[layer][row], new[:, path_to(tree, node)]], axis=1)
                    seen = seen[:, layout.seen(seen.shape[1])]
                    sinks_N = scores_of(cache, layer).sink_logits_N
                    expected_NH = attend_plainly(query_BMNH[row, node], *seen, sinks_N)
                    np.testing.assert_allclose(output_LBMNH[layer, row, node], expected_NH, atol=1e-5)
                kept[layer][row] = np.concatenate([kept[layer][row], new[:, path_to(tree, last)]], axis=1)
            path = path_to(tree, last)
            paths_BM[row], counts_B[row] = path + path[-1:] * (NODES - len(path)), len(path)
        cache = keep(cache, start_B, paths_BM, counts_B)
        for layer in range(LAYERS):
            for row in range(ROWS):
                length = kept[layer][row].shape[1]
                needed = layout.needed(length)
                held = layout.held(cache, row, needed)[:, layer]
                expected = kept[layer][row][:, needed]
                np.testing.assert_array_equal(held.reshape(expected.shape), expected)


@every_layout
@few
@given(st.tuples(*[st.integers(0, 12) for _ in range(ROWS)]), st.integers(0, 2**32 - 1))
def test_prompts_in_chunks_see_what_is_before_them(layout, lengths, seed):
    """Chunks of 6 tokens, more than some rings could write at once; padding evicts nothing from a shorter row."""
    rng = np.random.default_rng(seed)
    prompt = rng.standard_normal((2, LAYERS, ROWS, 12, KV_HEADS, WIDTH)).astype(np.float32)
    query_BTNH = rng.standard_normal((ROWS, 12, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    cache = filled_with_garbage(layout.create())
    lengths_B = np.array(lengths, np.int32)
    for start in (0, 6):
        chunk = slice(start, start + 6)
        cache, output_LBTNH = write_chunk(cache, start, lengths_B, *prompt[:, :, :, chunk], query_BTNH[:, chunk])
        inside = [(row, at) for row in range(ROWS) for at in range(start, min(start + 6, lengths[row]))]
        for row, position in inside:
            for layer in range(LAYERS):
                seen = prompt[:, layer, row, layout.seen(position + 1)]
                sinks_N = scores_of(cache, layer).sink_logits_N
                expected_NH = attend_plainly(query_BTNH[row, position], *seen, sinks_N)
                np.testing.assert_allclose(output_LBTNH[layer, row, position - start], expected_NH, atol=1e-5)
    for row, length in enumerate(lengths):
        needed = layout.needed(length)
        held = layout.held(cache, row, needed)[0]
        np.testing.assert_array_equal(
            held.reshape(LAYERS, len(needed), KV_HEADS, WIDTH), prompt[0, :, row, needed].swapaxes(0, 1)
        )


@jax.jit
def write_chunk(cache, start, lengths_B, keys_LBTKH, values_LBTKH, query_BTNH):
    start_B = jnp.full((ROWS,), start, jnp.int32)
    placement = cache.place(start_B, causal_ancestors(6)[None], lengths_B - start_B)
    outputs = []
    for layer in range(LAYERS):
        new = keys_LBTKH[layer], values_LBTKH[layer]
        mixed_BTNH, cache = cache.attend(layer, placement, query_BTNH, *new, scores_of(cache, layer), BACKEND)
        outputs.append(mixed_BTNH)
    return cache, jnp.stack(outputs)


@every_layout
def test_rewinding_needs_only_a_smaller_start(layout):
    """Writing again from an earlier slot on gives what writing there the first time would have given."""
    rng = np.random.default_rng(0)
    parents_BM = np.zeros((ROWS, NODES), np.int32)
    shape = (LAYERS, ROWS, NODES, KV_HEADS, WIDTH)
    first, wrong, right = (rng.standard_normal((2, *shape)).astype(np.float32) for _ in range(3))
    query_BMNH = rng.standard_normal((ROWS, NODES, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    zero_B, four_B = np.zeros(ROWS, np.int32), np.full(ROWS, NODES, np.int32)
    cache, _ = write_and_attend(layout.create(), zero_B, parents_BM, *first, query_BMNH)
    detour, _ = write_and_attend(cache, four_B, parents_BM, *wrong, query_BMNH)
    _, after_detour = write_and_attend(detour, four_B, parents_BM, *right, query_BMNH)
    _, directly = write_and_attend(cache, four_B, parents_BM, *right, query_BMNH)
    np.testing.assert_array_equal(after_detour, directly)


def test_a_ring_has_the_slots_that_its_window_needs_and_no_more_than_a_tile_beside():
    for window, headroom in [(1, 0), (7, 1), (8, 0), (512, 40), (4096, 63)]:
        assert window + headroom <= ring_capacity(window, headroom) < window + headroom + 16
        made = create_ring_cache(LAYERS, ROWS, window, headroom, 4, BACKEND)
        assert made.keys.shape == (LAYERS, ROWS, made.capacity, 4)


def test_what_does_not_fit_is_dropped_and_harms_nothing():
    rng = np.random.default_rng(0)
    cache = dense()
    start_B = np.array([SLOTS - 1, 3], np.int32)
    keys, values = rng.standard_normal((2, LAYERS, ROWS, NODES, KV_HEADS, WIDTH)).astype(np.float32)
    query_BMNH = np.zeros((ROWS, NODES, KV_HEADS * GROUPS, WIDTH), np.float32)
    cache, _ = write_and_attend(cache, start_B, np.zeros((ROWS, NODES), np.int32), keys, values, query_BMNH)
    written_BS = np.asarray(cache.keys[0] != 0).any(axis=-1)
    assert np.flatnonzero(written_BS[0]).tolist() == [SLOTS - 1]
    assert np.flatnonzero(written_BS[1]).tolist() == [3, 4, 5, 6]


@pytest.mark.slow
def test_reading_fewer_slots_than_there_are_changes_nothing():
    rng = np.random.default_rng(0)
    cache = dense()
    keys, values = rng.standard_normal((2, ROWS, NODES, KV_HEADS, WIDTH)).astype(np.float32)
    query_BMNH = rng.standard_normal((ROWS, NODES, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    start_B, chain_1MM = np.array([0, 4], np.int32), np.tril(np.ones((1, NODES, NODES), bool))
    outputs = []
    for extent in (None, 8):
        placement = cache.place(jnp.asarray(start_B), jnp.asarray(chain_1MM), extent=extent)
        new = [jnp.asarray(array) for array in (query_BMNH, keys, values)]
        mixed_BMNH, _ = cache.attend(0, placement, *new, Scores(SCALE), BACKEND)
        outputs.append(mixed_BMNH)
        assert placement.mask_BTS.shape[-1] == (extent or SLOTS)
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
