"""What is a paged cache's own: the same bits as a dense one, pages that rows share, and rows without pages."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.layouts import PagedLayout, parse_layout
from jaxinfer.cache.paged import create_paged_cache, even_table
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.pages import move_in_pages, move_one_by_one, write_in_pages, write_one_by_one
from tests.cache.test_laws import BACKEND, GROUPS, KV_HEADS, LAYERS, NODES, WIDTH, keep, write_and_attend

PAGE, COLUMNS, ROWS = 8, 5, 2
LANES = KV_HEADS * WIDTH


def paged(table_BX, pages=12):
    return create_paged_cache(LAYERS, pages, PAGE, np.array(table_BX, np.int32), LANES, BACKEND, None)


def drawn_step(rng):
    """Return the keys, values and queries of a step of random trees."""
    new = rng.standard_normal((2, LAYERS, ROWS, NODES, KV_HEADS, WIDTH)).astype(np.float32)
    parents_BM = np.array([[0] + [rng.integers(0, node) for node in range(1, NODES)] for _ in range(ROWS)], np.int32)
    return parents_BM, *new, rng.standard_normal((ROWS, NODES, KV_HEADS * GROUPS, WIDTH)).astype(np.float32)


def test_pages_give_the_bits_of_a_dense_cache():
    """Through steps that begin and end amid pages, keep part of what they wrote, and stand at other slots a row."""
    rng = np.random.default_rng(3)
    caches = {
        "dense": create_dense_cache(LAYERS, ROWS, PAGE * COLUMNS, LANES, BACKEND),
        "paged": paged([[11, 2, 9, 1, 5], [3, 8, 4, 10, 6]]),
    }
    start_B = np.array([0, 5], np.int32)
    for _ in range(7):
        step, outputs = drawn_step(rng), {}
        path_BM = np.array([[0, 1, 3, 3], [0, 2, 2, 2]], np.int32)
        count_B = np.array([3, 2], np.int32)
        for name, cache in caches.items():
            cache, outputs[name] = write_and_attend(cache, start_B, *step)
            caches[name] = keep(cache, start_B, path_BM, count_B)
        np.testing.assert_array_equal(outputs["dense"], outputs["paged"])
        start_B = start_B + count_B


@pytest.mark.parametrize("tile", [1, 2, 32])
def test_pages_written_one_by_one_are_those_of_a_scatter(tile):
    """But for page 0, which is nobody's and takes what a scatter drops."""
    rng = np.random.default_rng(6)
    pool, rows = (jnp.asarray(rng.integers(-9, 9, shape, np.int8)) for shape in ((3, 7, 4, 5), (2, 3, 5)))
    pages, slots = jnp.array([[1, 2, 7], [3, 3, 6]], jnp.int32), jnp.array([[0, 3, 1], [2, 1, 0]], jnp.int32)
    targets = jnp.array([[5, 4, 7], [4, 1, 2]], jnp.int32), slots
    written = write_in_pages(pool, 1, pages, slots, rows), write_one_by_one(pool, 1, pages, slots, rows, tile=tile)
    moved = move_in_pages(pool, (pages, slots), targets), move_one_by_one(pool, (pages, slots), targets)
    for one, other in (written, moved):
        assert not np.array_equal(one, pool)
        np.testing.assert_array_equal(np.asarray(one)[:, 1:], np.asarray(other)[:, 1:])


def test_rows_that_share_pages_read_the_same_and_write_to_their_own():
    rng = np.random.default_rng(4)
    cache = paged([[1, 2, 3, 0, 0], [1, 4, 5, 0, 0]])
    begun = np.zeros(ROWS, np.int32)
    parents_BM, *new = drawn_step(rng)
    for start in (0, NODES):
        # Row 0 alone writes: row 1 stands past its last page.
        cache, _ = write_and_attend(cache, np.array([start, 3 * PAGE], np.int32), parents_BM, *new)
    shared = np.asarray(cache.keys[:, 1])
    query = new[2].copy()
    query[1] = query[0]
    same = [np.repeat(array[:, :1], ROWS, axis=1) for array in new[:2]]
    cache, output_LBMNH = write_and_attend(cache, begun + PAGE, np.repeat(parents_BM[:1], ROWS, axis=0), *same, query)
    np.testing.assert_array_equal(output_LBMNH[:, 0], output_LBMNH[:, 1])
    np.testing.assert_array_equal(cache.keys[:, 1], shared)
    np.testing.assert_array_equal(cache.keys[:, 2], cache.keys[:, 4])
    assert np.asarray(cache.keys[:, 2, :NODES]).any()


def test_rows_without_pages_write_nothing():
    """Neither to page 0, which is nobody's, nor to the pages of others."""
    cache = paged([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    cache, _ = write_and_attend(cache, np.array([2, PAGE - 2], np.int32), *drawn_step(np.random.default_rng(5)))
    path_BM = np.array([[0, 1, 1, 1]] * ROWS, np.int32)
    cache = keep(cache, np.array([2, PAGE - 2], np.int32), path_BM, np.array([2, 2], np.int32))
    written_PZ = np.asarray(cache.keys != 0).any(axis=(0, 3))
    assert np.argwhere(written_PZ).tolist() == [[1, PAGE - 2], [1, PAGE - 1]]


def test_tables_of_rows_that_have_as_many_pages_each():
    assert even_table(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert jnp.asarray(even_table(1, 1)).dtype == jnp.int32


def test_what_users_write():
    assert parse_layout("paged") == PagedLayout(64)
    assert parse_layout("paged:page=16") == PagedLayout(16)
    for wrong in ("paged:page=12", "paged:page=4", "paged:page=0"):
        with pytest.raises(InvalidOption, match="power of two of 8 or more"):
            parse_layout(wrong)


@pytest.mark.slow
def test_texts_are_those_of_a_dense_cache_and_a_mesh_is_refused(trained_folder):
    options = {"max_new_tokens": 40, "sampling": SamplingParams(temperature=0.9, seed=2, logprobs=True)}
    prompts = ["The old", "A", "One grey heron"]
    texts = [
        [(one.tokens, one.logprobs) for one in jaxinfer.load(trained_folder, cache=cache).generate(prompts, **options)]
        for cache in ("dense", "paged:page=16")
    ]
    assert texts[0] == texts[1]
    with pytest.raises(InvalidOption, match="cache paged runs on one device"):
        jaxinfer.load(trained_folder, cache="paged", mesh="data=1")


def test_rows_that_go_on_from_others_read_what_these_held_and_write_pages_of_their_own():
    """Two go on from one row, and another from itself; one without pages harms nobody."""
    rng, layers = np.random.default_rng(2), 2
    table_BX = np.array([[1, 2, 3], [4, 5, 6], [0, 0, 0], [7, 8, 9], [10, 11, 12]], np.int32)
    parents_B = np.array([1, 0, 2, 0, 4], np.int32)
    pages = set(range(14))
    cache = create_paged_cache(layers, len(pages), PAGE, table_BX, LANES, BACKEND, None)
    before = rng.standard_normal((2, *cache.keys.shape)).astype(np.float32)
    cache = replace(cache, keys=jnp.asarray(before[0]), values=jnp.asarray(before[1]))
    fork = jax.jit(lambda held_B: cache.forked(jnp.asarray(parents_B), held_B))
    for held in (7, 8, 13, 16):
        forked, full = fork(np.full(5, held, np.int32)), held // PAGE
        now_BX = np.asarray(forked.table_BX)
        for row, parent in ((0, 1), (1, 0), (3, 0), (4, 4)):
            for old, new in zip(before, (forked.keys, forked.values)):
                found, expected = np.asarray(new)[:, now_BX[row]], old[:, table_BX[parent]]
                np.testing.assert_array_equal(
                    *(each.reshape(layers, -1, LANES)[:, :held] for each in (found, expected))
                )
        # Full pages change hands, and what the next step writes is nobody else's.
        assert (now_BX[:, :full] == table_BX[parents_B, :full]).all()
        assert (now_BX[:, full:] == table_BX[:, full:]).all()
        copied = {int(page) for page in now_BX[[0, 1, 3], full]} if held % PAGE else set()
        untouched = sorted(pages - copied)
        np.testing.assert_array_equal(np.asarray(forked.keys)[:, untouched], before[0][:, untouched])
