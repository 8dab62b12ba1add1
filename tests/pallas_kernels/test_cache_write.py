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


@functools.cache
def programs():
    return jax.jit(functools.partial(cache_write, interpret=True)), jax.jit(reference_write)


def inputs(tokens: int, starts: list[int], seed: int, dtype: str):
    rng = np.random.default_rng(seed)
    held = (random_array(rng, (2, ROWS, SLOTS, 128), dtype) for _ in range(2))
    new = (random_array(rng, (ROWS, tokens, 128), dtype) for _ in range(2))
    return *held, *new, jnp.int32(1), jnp.array(starts, jnp.int32)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    st.sampled_from(TOKENS),
    st.lists(st.integers(0, SLOTS + 2), min_size=ROWS, max_size=ROWS),
    st.integers(0, 1 << 16),
    st.sampled_from(["float32", "bfloat16"]),
)
@example(17, [0, 15, 64], 0, "bfloat16")
@example(40, [7, 31, 72], 1, "float32")
@example(1, [71, 16, 15], 2, "bfloat16")
def test_every_slot_holds_what_it_should(tokens, starts, seed, dtype):
    """To the bit, at any starts, over the end of the cache and past it."""
    kernel, reference = programs()
    arguments = inputs(tokens, starts, seed, dtype)
    for found, expected in zip(kernel(*arguments), reference(*arguments)):
        assert jnp.array_equal(found, expected)


def test_no_two_accesses_race():
    arguments = inputs(17, [0, 15, 64], 0, "float32")
    try:
        found = cache_write(*arguments, interpret=pltpu.InterpretParams(detect_races=True))
        assert all(jnp.array_equal(*pair) for pair in zip(found, reference_write(*arguments)))
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_does_not_fit_is_refused_by_value():
    cache, new, starts = jnp.zeros((1, 2, 64, 128)), jnp.zeros((2, 3, 128)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="129"):
        cache_write(cache, cache, jnp.zeros((2, 129, 128)), jnp.zeros((2, 129, 128)), 0, starts)
    with pytest.raises(ValueError, match="int8"):
        cache_write(cache.astype(jnp.int8), cache.astype(jnp.int8), new, new, 0, starts)
    with pytest.raises(ValueError, match=r"starts \(3,\)"):
        cache_write(cache, cache, new, new, 0, jnp.zeros(3, jnp.int32))


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "tokens", "lanes", "dtype"),
    [
        ("v5e", 1, 1024, "bfloat16"),
        ("v6e", 64, 4096, "bfloat16"),
        ("v5p", 8, 1024, "float32"),
        ("tpu7x", 1, 256, "bfloat16"),
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
