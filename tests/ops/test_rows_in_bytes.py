"""Rows in bytes: what they stand for, whatever numbers they are made of, and queries and keys that even them out."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.slots import slots_in_tiles
from jaxinfer.errors import InvalidOption
from jaxinfer.ops import hadamard, rows_in_bytes
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.rows_in_bytes import CACHE_DTYPES, row_lanes

to_bytes = jax.jit(rows_in_bytes.to_bytes, static_argnums=(1, 2, 3))
to_numbers = jax.jit(rows_in_bytes.to_numbers, static_argnums=(1, 2, 3, 4))
by_head = jax.jit(rows_in_bytes.by_head, static_argnums=(1, 2, 3))
from_heads = jax.jit(rows_in_bytes.from_heads, static_argnums=(1, 2))
even_out, transform = jax.jit(hadamard.even_out, static_argnums=2), jax.jit(hadamard.transform, static_argnums=1)
HEADS, WIDTH = 4, 8
LANES = row_lanes(HEADS, WIDTH)


def heads_of(seed: int, count: int = 200) -> np.ndarray:
    """Return heads of numbers of every size, some of them all zeros."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-120, 120, (1, count, HEADS, 1))) * rng.integers(0, 8, (1, count, HEADS, 1)).clip(0, 1)
    return (rng.standard_normal((1, count, HEADS, WIDTH)) * sizes).astype(np.float32)


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_numbers_come_back_as_near_as_bits_allow_and_nothing_overflows(name):
    heads = heads_of(0)
    rows = to_bytes(jnp.asarray(heads), CACHE_DTYPES[name], LANES + 3, 1)
    assert (rows.dtype, rows.shape) == (CACHE_DTYPES[name], (1, 200, LANES + 3))
    found = np.asarray(to_numbers(rows, HEADS, WIDTH, 1, jnp.float32)).reshape(heads.shape)
    largest = np.abs(heads).max(axis=-1, keepdims=True)
    # Half a step of 127 of a scale that is at most a 128th too large; of floats, half of one of 8 steps, or of the
    # smallest step.
    of_integers, of_floats = largest / 254, np.maximum(np.abs(heads) / 16, largest / 448 / 2**10)
    most = (of_integers if name == "int8" else of_floats) * (1 + 2**-7) + 1e-30
    assert np.all(np.abs(found - heads) <= most)
    assert np.all(np.isfinite(found))
    assert not np.asarray(rows[..., LANES:]).any()
    if name == "int8":
        codes = np.asarray(by_head(rows, HEADS, WIDTH, 1))[..., :WIDTH]
        assert np.abs(codes.astype(int)).max() == 127


def test_what_is_no_number_is_none_afterwards():
    """Damage shows in the results, and in its head alone."""
    heads = heads_of(1, 8)
    heads[0, 3, 1, 2] = np.nan
    heads[0, 5, 0, 0] = np.inf
    found = to_numbers(to_bytes(jnp.asarray(heads), "int8", LANES, 1), HEADS, WIDTH, 1, jnp.float32)
    lost = ~np.isfinite(np.asarray(found).reshape(heads.shape))
    assert lost.all(axis=-1).sum() == lost.any(axis=-1).sum() == 2
    assert lost[0, [3, 5], [1, 0]].all()


def test_each_device_has_rows_of_its_own_heads():
    heads = jnp.asarray(heads_of(2, 6))
    split = to_bytes(heads, "int8", LANES + 4, 2)
    for part, own in zip(jnp.split(split, 2, axis=-1), jnp.split(heads, 2, axis=2)):
        assert np.array_equal(part, to_bytes(own, "int8", LANES // 2 + 2, 1))
    assert np.array_equal(from_heads(by_head(split, HEADS, WIDTH, 2), LANES + 4, 2), split)
    whole = to_numbers(to_bytes(heads, "int8", LANES, 1), HEADS, WIDTH, 1, jnp.float32)
    assert np.array_equal(to_numbers(split, HEADS, WIDTH, 2, jnp.float32), whole)


@pytest.mark.parametrize("width", [64, 24, 5])
def test_evened_queries_and_keys_have_the_same_products(width):
    rng = np.random.default_rng(width)
    query, keys = (jnp.asarray(rng.standard_normal((2, 3, heads, width)), jnp.float32) for heads in (4, 2))
    evened = even_out(query, keys, "cpu")
    products = [jnp.einsum("btnh,bskh->bnkts", *pair, precision="highest") for pair in ((query, keys), evened)]
    np.testing.assert_allclose(products[1], products[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(transform(evened[0], "cpu"), query, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(transform(keys, "tpu"), transform(keys, "cpu"), rtol=1e-5, atol=1e-5)
    if width > 5:
        # One large number becomes several that are equally large.
        one = jnp.zeros((1, 1, 1, width)).at[..., 3].set(7.0)
        assert np.count_nonzero(np.abs(transform(one, "cpu")) == 7) == width & -width


def test_lanes_of_a_cache_are_whole_tiles_on_every_device():
    on_tpu = choose_backend("bfloat16", "tpu", cache_dtype="int8")
    assert [on_tpu.cache_lanes(heads, 128) for heads in (1, 8, 32)] == [256, 1152, 4224]
    assert on_tpu.cache_lanes(3, 64) == 256
    assert [slots_in_tiles(slots, on_tpu) for slots in (1, 17, 2048, 2064)] == [16, 48, 2064, 2064]
    assert replace(on_tpu, kv_shards=4).cache_lanes(8, 128) == 4 * 384
    assert choose_backend("float32", "cpu", cache_dtype="fp8").cache_lanes(3, 64) == 208


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("float32", "cpu", "int4"), ("int4", "int8 or fp8")),
        (("float64", "cpu", "int8"), ("float64", "leave it out")),
        (("bfloat16", "tpu", "fp8"), ("fp8", "v5e", "use int8")),
    ],
)
def test_what_no_cache_is_kept_in_is_refused_in_one_line(options, words):
    dtype, platform, cache_dtype = options
    with jax.enable_x64(True), pytest.raises(InvalidOption) as error:
        choose_backend(dtype, platform, cache_dtype=cache_dtype)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
