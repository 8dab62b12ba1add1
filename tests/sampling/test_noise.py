import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import ROLE_ACCEPT, ROLE_DRAFT, ROLE_RESIDUAL, ROLE_TARGET, gumbel, request_key, role
from jaxinfer.sampling.noise import fold_in, gumbel_of_bits, random_bits

SEEDS = [0, 1, 7, 2**31 - 1, 2**32 - 1]


def jax_key(seed: int) -> jax.Array:
    return jax.random.wrap_key_data(jnp.array([0, seed], jnp.uint32), impl="threefry2x32")


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_and_folds_are_those_of_jax(seed):
    if seed < 2**31:
        assert (request_key(seed) == jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))).all()
    assert (request_key(seed) == jax.random.key_data(jax_key(seed))).all()
    for number in (0, 1, 12345):
        folded = jax.random.key_data(jax.random.fold_in(jax_key(seed), number))
        assert (fold_in(request_key(seed), number) == folded).all()
        if number > 0:
            assert (request_key(seed, sample=number) == folded).all()


def test_a_seed_beyond_32_bits_keeps_its_upper_half_as_jax_does_with_x64():
    with jax.enable_x64(True):
        expected = np.asarray(jax.random.key_data(jax.random.key(5 * 2**32 + 3, impl="threefry2x32")))
    assert (request_key(5 * 2**32 + 3) == expected).all()
    assert (request_key(5 * 2**32 + 3) != request_key(3)).any()


@pytest.mark.parametrize("partitionable_setting", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_those_of_jax_in_its_partitionable_form_whatever_the_setting(seed, partitionable_setting):
    with jax.threefry_partitionable(True):
        expected = jax.random.bits(jax_key(seed), (1001,), jnp.uint32)
    with jax.threefry_partitionable(partitionable_setting):
        bits = jax.jit(random_bits)(request_key(seed), np.arange(1001))
    assert (np.asarray(bits) == np.asarray(expected)).all()


def test_noise_is_keyed_by_position_then_role():
    key = jax.random.fold_in(jax.random.fold_in(jax_key(9), 31), ROLE_DRAFT)
    expected = jax.jit(lambda key: gumbel_of_bits(random_bits(key, jnp.arange(50))))(jax.random.key_data(key))
    found = jax.jit(gumbel)(request_key(9), 31, ROLE_DRAFT, np.arange(50))
    assert (np.asarray(found) == np.asarray(expected)).all()


def test_noise_is_finite_and_falls_with_the_bits_up_to_both_ends():
    bits = np.array([0, 1, 2, 3, 2**8, 2**23, 2**24 + 1, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = np.asarray(jax.jit(gumbel_of_bits)(bits))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert (np.diff(noise[:8]) < 0).all()
    exact = -np.log(-np.log1p(-(bits[:8].astype(np.float64) + 0.5) * 2.0**-32))
    np.testing.assert_allclose(noise[:8], exact, rtol=1e-6)


def test_a_tokens_noise_ignores_padding_order_shards_and_other_rows():
    noise = jax.jit(gumbel)
    keys = np.stack([request_key(seed) for seed in range(3)])[:, None]
    positions = np.array([[4, 9], [4, 4], [0, 2**20]], np.int32)
    whole = np.asarray(noise(keys, positions, ROLE_TARGET, np.arange(1000)))
    padded = np.asarray(noise(keys, positions, ROLE_TARGET, np.arange(1024)))
    assert (padded[..., :1000] == whole).all()
    shard = np.asarray(noise(keys[1, 0], positions[1], ROLE_TARGET, np.arange(700, 863)))
    assert (shard == whole[1, :, 700:863]).all()
    shortlist = np.array([999, 3, 512])
    assert (np.asarray(noise(keys[2, 0], positions[2, 1], ROLE_TARGET, shortlist)) == whole[2, 1, shortlist]).all()


def test_roles_are_distinct_over_levels_and_the_target_is_zero():
    roles = [role(kind, level) for level in range(3) for kind in (ROLE_DRAFT, ROLE_ACCEPT, ROLE_RESIDUAL)]
    assert roles == list(range(1, 10))
    assert role(ROLE_TARGET, 0) == role(ROLE_TARGET, 2) == 0
