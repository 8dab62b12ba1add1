"""A cache without values mixes its keys, as one with both alike does: in trees, in chunks, after a path is kept."""

from dataclasses import replace

import numpy as np
import pytest

from tests.cache.test_laws import (
    GROUPS,
    KV_HEADS,
    LAYERS,
    LAYOUTS,
    NODES,
    ROWS,
    WIDTH,
    filled_with_garbage,
    keep,
    write_and_attend,
    write_chunk,
)

WIDE = ("ring-window-3", "retrieval-tail", "streaming-2-3")


@pytest.mark.parametrize("name", ["dense", "paged", *(pytest.param(name, marks=pytest.mark.slow) for name in WIDE)])
def test_keys_are_values_too(name):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    both = filled_with_garbage(LAYOUTS[name].create())
    rows = replace(both, values=both.values[..., :0])
    lengths_B, parents_BM = np.array([5, 3], np.int32), np.array([[0, 0, 1, 1], [0, 0, 0, 2]], np.int32)
    new, query_BTNH = normal(LAYERS, ROWS, 6, KV_HEADS, WIDTH), normal(ROWS, 6, KV_HEADS * GROUPS, WIDTH)
    both, expected = write_chunk(both, 0, lengths_B, new, new, query_BTNH)
    rows, found = write_chunk(rows, 0, lengths_B, new, new, query_BTNH)
    for row, length in enumerate(lengths_B):
        np.testing.assert_array_equal(found[:, row, :length], expected[:, row, :length])
    for _ in range(2):
        new, query_BMNH = normal(LAYERS, ROWS, NODES, KV_HEADS, WIDTH), normal(ROWS, NODES, KV_HEADS * GROUPS, WIDTH)
        both, expected = write_and_attend(both, lengths_B, parents_BM, new, new, query_BMNH)
        rows, found = write_and_attend(rows, lengths_B, parents_BM, new, new, query_BMNH)
        np.testing.assert_array_equal(found, expected)
        path = np.array([[0, 1, 3, 3], [0, 2, 3, 3]], np.int32), np.array([3, 2], np.int32)
        both, rows = (keep(cache, lengths_B, *path) for cache in (both, rows))
        lengths_B = lengths_B + path[1]
    assert rows.values.size == 0
