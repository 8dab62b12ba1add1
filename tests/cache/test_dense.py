"""The laws of `jaxinfer.cache.interface`, held by the dense cache through random sequences of draft trees."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.dense import DenseCache, create_dense_cache
from jaxinfer.cache.interface import Cache
from jaxinfer.decoding.tree import ancestors
from tests.toys import float32_backend

LAYERS, ROWS, SLOTS, NODES, KV_HEADS, WIDTH = 2, 2, 16, 4, 2, 4
GROUPS = 2
SCALE = WIDTH**-0.5
BACKEND = float32_backend()
GARBAGE = 1e4

trees = st.tuples(*[st.integers(0, max(node - 1, 0)) for node in range(NODES)])
steps = st.lists(st.tuples(*[st.tuples(trees, st.integers(0, NODES - 1)) for _ in range(ROWS)]), min_size=1, max_size=4)
few = settings(derandomize=True, max_examples=25, deadline=None)


def path_to(parents, node):
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def attend_plainly(query_NH, keys_SKH, values_SKH):
    """Attention of one token over the tokens that it sees, head by head, in float64."""
    output = np.zeros(query_NH.shape)
    for head, query_H in enumerate(query_NH.astype(np.float64)):
        scores_S = keys_SKH[:, head // GROUPS] @ query_H * SCALE
        weights_S = np.exp(scores_S - scores_S.max())
        output[head] = weights_S @ values_SKH[:, head // GROUPS] / weights_S.sum()
    return output


@jax.jit
def write_and_attend(cache, start_B, parents_BM, keys_LBMKH, values_LBMKH, query_BMNH):
    placement = cache.place(start_B, ancestors(parents_BM))
    outputs = []
    for layer in range(LAYERS):
        cache = cache.write(layer, placement, keys_LBMKH[layer], values_LBMKH[layer])
        outputs.append(cache.attend(layer, placement, query_BMNH, SCALE, BACKEND))
    return cache, jnp.stack(outputs)


keep = jax.jit(DenseCache.keep)


@few
@given(steps, st.integers(0, 2**32 - 1))
def test_trees_see_what_was_kept_and_their_own_ancestors(steps, seed):
    """Each step writes a tree in each row, attends from all its nodes, and keeps the path to one of them.

    The cache begins full of garbage, so whatever stands past a row's length would show.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    empty = create_dense_cache(LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH, BACKEND)
    assert isinstance(empty, Cache)
    cache = jax.tree.map(lambda leaf: leaf + GARBAGE, empty)
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
                    expected_NH = attend_plainly(query_BMNH[row, node], *seen)
                    np.testing.assert_allclose(output_LBMNH[layer, row, node], expected_NH, atol=1e-5)
                kept[layer][row] = np.concatenate([kept[layer][row], new[:, path_to(tree, last)]], axis=1)
            path = path_to(tree, last)
            paths_BM[row], counts_B[row] = path + path[-1:] * (NODES - len(path)), len(path)
        cache = keep(cache, start_B, paths_BM, counts_B)
        for layer in range(LAYERS):
            for row in range(ROWS):
                length = kept[layer][row].shape[1]
                held = np.stack([cache.keys[layer, row, :length], cache.values[layer, row, :length]])
                np.testing.assert_array_equal(held.reshape(kept[layer][row].shape), kept[layer][row])


def test_rewinding_needs_only_a_smaller_start():
    """Writing again from an earlier slot on gives what writing there the first time would have given."""
    rng = np.random.default_rng(0)
    parents_BM = np.zeros((ROWS, NODES), np.int32)
    shape = (LAYERS, ROWS, NODES, KV_HEADS, WIDTH)
    first, wrong, right = (rng.standard_normal((2, *shape)).astype(np.float32) for _ in range(3))
    query_BMNH = rng.standard_normal((ROWS, NODES, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    zero_B, four_B = np.zeros(ROWS, np.int32), np.full(ROWS, NODES, np.int32)
    empty = create_dense_cache(LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH, BACKEND)
    cache, _ = write_and_attend(empty, zero_B, parents_BM, *first, query_BMNH)
    detour, _ = write_and_attend(cache, four_B, parents_BM, *wrong, query_BMNH)
    detour, _ = write_and_attend(detour, 2 * four_B, parents_BM, *wrong, query_BMNH)
    _, after_detour = write_and_attend(detour, four_B, parents_BM, *right, query_BMNH)
    _, directly = write_and_attend(cache, four_B, parents_BM, *right, query_BMNH)
    np.testing.assert_array_equal(after_detour, directly)


def test_what_does_not_fit_is_dropped_and_harms_nothing():
    rng = np.random.default_rng(0)
    cache = create_dense_cache(LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH, BACKEND)
    start_B = np.array([SLOTS - 1, 3], np.int32)
    keys, values = rng.standard_normal((2, LAYERS, ROWS, NODES, KV_HEADS, WIDTH)).astype(np.float32)
    query_BMNH = np.zeros((ROWS, NODES, KV_HEADS * GROUPS, WIDTH), np.float32)
    cache, _ = write_and_attend(cache, start_B, np.zeros((ROWS, NODES), np.int32), keys, values, query_BMNH)
    written_BS = np.asarray(cache.keys[0] != 0).any(axis=-1)
    assert np.flatnonzero(written_BS[0]).tolist() == [SLOTS - 1]
    assert np.flatnonzero(written_BS[1]).tolist() == [3, 4, 5, 6]


def test_reading_fewer_slots_than_there_are_changes_nothing():
    rng = np.random.default_rng(0)
    cache = create_dense_cache(LAYERS, ROWS, SLOTS, KV_HEADS * WIDTH, BACKEND)
    keys, values = rng.standard_normal((2, ROWS, NODES, KV_HEADS, WIDTH)).astype(np.float32)
    query_BMNH = rng.standard_normal((ROWS, NODES, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)
    start_B, chain_1MM = np.array([0, 4], np.int32), np.tril(np.ones((1, NODES, NODES), bool))
    outputs = []
    for extent in (None, 8):
        placement = cache.place(jnp.asarray(start_B), jnp.asarray(chain_1MM), extent)
        written = cache.write(0, placement, jnp.asarray(keys), jnp.asarray(values))
        outputs.append(written.attend(0, placement, jnp.asarray(query_BMNH), SCALE, BACKEND))
        assert placement.mask_BTS.shape[-1] == (extent or SLOTS)
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
