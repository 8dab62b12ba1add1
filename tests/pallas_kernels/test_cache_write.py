"""cache_write against its reference, in interpret mode, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_write.op import cache_write
from pallas_kernels.cache_write.reference import reference_write
from tests.pallas_kernels.cached_attention import assert_no_races, random_array
from tests.pallas_kernels.tpu_programs import compile_for

ROWS = 3
SLOTS = 72
TOKENS = (1, 2, 17, 40)
BLOCKS = 16


@functools.cache
def programs(**order):
    kernel = functools.partial(cache_write, block_slots=BLOCKS, interpret=True, **order)
    return jax.jit(kernel), jax.jit(functools.partial(reference_write, **order))


def inputs(tokens: int, starts: list[int], seed: int, dtype: str):
    rng = np.random.default_rng(seed)
    held = (random_array(rng, (2, ROWS, SLOTS, 128), dtype) for _ in range(2))
    new = (random_array(rng, (ROWS, tokens, 128), dtype) for _ in range(2))
    return *held, *new, np.int32(1), np.array(starts, np.int32)


def check(arguments: tuple, **order) -> None:
    kernel, reference = programs(**order)
    for found, expected in zip(kernel(*arguments), reference(*arguments)):
        np.testing.assert_array_equal(found, expected)


any_starts = st.lists(st.integers(0, SLOTS + 2), min_size=ROWS, max_size=ROWS)


@pytest.mark.slow
@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.sampled_from([(17, "bfloat16"), (40, "float32"), (1, "bfloat16")]), any_starts, st.integers(0, 1 << 16))
@example((17, "bfloat16"), [0, 15, 64], 0)
@example((40, "float32"), [7, 31, 72], 1)
@example((1, "bfloat16"), [71, 16, 15], 2)
def test_every_slot_holds_what_it_should(case, starts, seed):
    """To the bit, at any starts, over the end of the cache and past it."""
    tokens, dtype = case
    check(inputs(tokens, starts, seed, dtype))


@pytest.mark.slow
@settings(derandomize=True, max_examples=8, deadline=None)
@given(st.sampled_from(TOKENS), any_starts, st.integers(0, 1 << 16), st.sampled_from(["float32", "bfloat16"]))
def test_every_slot_holds_what_it_should_in_every_dtype(tokens, starts, seed, dtype):
    check(inputs(tokens, starts, seed, dtype))


any_rows_of_a_ring = (
    st.lists(st.integers(0, 300), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, 40), min_size=ROWS, max_size=ROWS),
    st.integers(0, 1 << 16),
)


def check_ring(case, starts, counts, seed):
    num_sinks, tokens = case
    check((*inputs(tokens, starts, seed, "float32"), np.array(counts, np.int32)), num_sinks=num_sinks)


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.sampled_from([(0, 40), (20, 17)]), *any_rows_of_a_ring)
@example((0, 40), [71, 32, 56], [40, 40, 40], 0)
@example((20, 17), [3, 60, 71], [17, 12, 1], 1)
@example((20, 17), [19, 71, 123], [2, 2, 0], 2)
def test_tokens_go_around_a_ring_and_padding_does_not(case, starts, counts, seed):
    """Behind sinks or none, from starts among the sinks, at the ring's end and after many rounds."""
    check_ring(case, starts, counts, seed)


@pytest.mark.slow
@settings(derandomize=True, max_examples=8, deadline=None)
@given(st.sampled_from([(None, 40), (0, 40), (4, 17), (20, 2), (16, 1)]), *any_rows_of_a_ring)
@example((4, 17), [3, 60, 71], [17, 12, 1], 1)
@example((20, 2), [19, 71, 123], [2, 2, 0], 2)
def test_tokens_go_around_any_ring(case, starts, counts, seed):
    check_ring(case, starts, counts, seed)


@pytest.mark.parametrize("num_sinks", [pytest.param(None, marks=pytest.mark.exhaustive), 4])
def test_no_two_accesses_race(num_sinks):
    arguments = inputs(17, [0, 15, 64], 0, "float32")
    order = {"num_sinks": num_sinks}
    try:
        mode = pltpu.InterpretParams(detect_races=True)
        # Whole blocks: an aliased cache that ends within one is more than the mode can do.
        kernel = functools.partial(cache_write, **order, block_slots=8, interpret=mode)
        for found, expected in zip(jax.jit(kernel)(*arguments), programs(**order)[1](*arguments)):
            np.testing.assert_array_equal(found, expected)
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_does_not_fit_is_refused_by_value():
    cache, new, starts = jnp.zeros((1, 2, 64, 128)), jnp.zeros((2, 3, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="3 tokens and two blocks of 32 exceed a ring of 64 slots"):
        cache_write(cache, cache, new, new, 0, starts, num_sinks=4, block_slots=32)
    with pytest.raises(ValueError, match="block_slots=20"):
        cache_write(cache, cache, new, new, 0, starts, block_slots=20)
    with pytest.raises(ValueError, match="no new tokens"):
        cache_write(cache, cache, jnp.zeros((2, 0, 128)), jnp.zeros((2, 0, 128)), 0, starts)
    with pytest.raises(ValueError, match="int16"):
        cache_write(cache.astype(jnp.int16), cache.astype(jnp.int16), new, new, 0, starts)
    with pytest.raises(ValueError, match=r"starts \(3,\)"):
        cache_write(cache, cache, new, new, 0, jnp.zeros(3, jnp.int32))


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "tokens", "lanes", "dtype"),
    [
        ("v5e", 17, 1024, "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("v5e", 1, 1024, "bfloat16"),
                ("v6e", 2048, 4096, "bfloat16"),
                ("v5p", 8, 1024, "float32"),
                ("tpu7x", 1, 256, "bfloat16"),
            )
        ),
    ],
)
def test_the_cache_is_updated_where_it_lies(chip, tokens, lanes, dtype):
    cache = jax.ShapeDtypeStruct((4, 8, 2048, lanes), dtype)
    new = jax.ShapeDtypeStruct((8, tokens, lanes), dtype)
    arguments = (cache, cache, new, new, np.int32(0).reshape(()), np.zeros(8, np.int32))
    needed, aliased = compile_for(chip, cache_write, arguments, donated=(0, 1))
    cache_bytes = np.prod(cache.shape) * jnp.dtype(dtype).itemsize
    assert aliased == 2 * cache_bytes
    assert needed < 0.02 * cache_bytes
