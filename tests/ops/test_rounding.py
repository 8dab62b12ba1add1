"""On a CPU, an element's bits do not depend on the array's shape, its place there, or what is computed around it.

The counterexample is a scaled embedding that is added to: compiled together, product and sum are rounded once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.models.config import Rope, Sharpening
from jaxinfer.models.mlp import ACTIVATIONS
from jaxinfer.models.positions import rotary_tables, sharpened
from jaxinfer.ops.rotation import rotate
from jaxinfer.ops.rounding import rounded
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.noise import gumbel, vocabulary_ids
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.transforms import temper
from tests.ops.foreign_calls import drawn

pytestmark = pytest.mark.optimised

PARTS = (np.s_[:1, :1], np.s_[4:, :3], np.s_[1:4, 1:2])


def check_parts(function, *arrays):
    """Compare rows and tokens [B, T] alone, in company, and in a loop."""
    together = np.asarray(jax.jit(function)(*arrays))
    for part in PARTS:
        np.testing.assert_array_equal(jax.jit(function)(*(array[part] for array in arrays)), together[part])

    @jax.jit
    def looped(*arrays):
        def step(row, results):
            ones = (lax.dynamic_slice_in_dim(array, row, 1) for array in arrays)
            return lax.dynamic_update_slice_in_dim(results, function(*ones), row, 0)

        return lax.fori_loop(0, len(arrays[0]), step, jnp.zeros_like(together))

    np.testing.assert_array_equal(looped(*arrays), together)
    return together


def test_a_rounded_product_is_added_to_as_if_it_was_stored():
    rng = np.random.default_rng(0)
    one, other = drawn(rng, (5, 3, 100)), drawn(rng, (5, 3, 100))

    def summed(one, other):
        return rounded(one * np.float32(25.3)) + other

    np.testing.assert_array_equal(check_parts(summed, one, other), one * np.float32(25.3) + other)
    merged = jax.jit(lambda one, other: one * np.float32(25.3) + other)(one, other)
    exact = np.float32(np.float64(one) * np.float32(25.3) + other)
    # Where the processor can, and so there is something to prevent.
    assert np.array_equal(merged, exact) or np.array_equal(merged, one * np.float32(25.3) + other)


@pytest.mark.slow
@pytest.mark.parametrize("width", [12, 64])
def test_rotations_have_the_same_bits_with_all_that_goes_before(width):
    rng = np.random.default_rng(1)
    heads, bias = drawn(rng, (5, 3, 3, width)), drawn(rng, (3, width))
    positions = rng.integers(0, 5000, (5, 3)).astype(np.int32)

    def tables(positions):
        lengths = jnp.zeros(len(positions), jnp.int32)
        return jnp.stack(rotary_tables(Rope(10000.0, width), positions, lengths, jnp.dtype("float32")), axis=2)

    angles = check_parts(tables, positions)
    apart = check_parts(lambda heads, angles: rotate(heads, angles[:, :, 0], angles[:, :, 1]), heads + bias, angles)

    def fused(heads, positions):
        angles = tables(positions)
        return rotate(heads + bias, angles[:, :, 0], angles[:, :, 1])

    np.testing.assert_array_equal(check_parts(fused, heads, positions), apart)


def test_growing_queries_have_the_same_bits_with_all_that_goes_around():
    positions = np.random.default_rng(4).integers(0, 5000, (5, 64)).astype(np.int32)
    growth = Sharpening(0.4, 5)
    found = check_parts(lambda positions: sharpened(growth, positions, jnp.dtype("float32")), positions)
    logarithms = jax.jit(jnp.log1p)(np.float32((positions + 1) // 5))
    np.testing.assert_array_equal(found, 1 + np.float32(0.4) * np.asarray(logarithms))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_have_the_same_bits_with_all_that_goes_around(name):
    rng = np.random.default_rng(2)
    gate, up, bias = 3 * drawn(rng, (5, 3, 100)), drawn(rng, (5, 3, 100)), drawn(rng, (100,))
    apart = check_parts(ACTIVATIONS[name], gate + bias)
    fused = check_parts(lambda gate, up: ACTIVATIONS[name](gate + bias) * up, gate, up)
    np.testing.assert_array_equal(fused, apart * up)


@pytest.mark.parametrize("vocab_size", [31, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_noise_has_the_same_bits_with_all_that_goes_around(vocab_size):
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**32, (5, 2), dtype=np.uint32)
    positions, logits = rng.integers(0, 99, (5, 3)), drawn(rng, (5, 3, vocab_size))
    keys = np.broadcast_to(keys[:, None], (5, 3, 2))

    def noise(keys, positions):
        return gumbel(keys, positions, 0, vocabulary_ids(vocab_size))

    apart = check_parts(noise, keys, positions)
    # XLA computes this division in its own way.
    tempered = check_parts(tempered_at_070, logits)
    fused = check_parts(
        lambda keys, positions, logits: tempered_at_070(logits) + noise(keys, positions), keys, positions, logits
    )
    np.testing.assert_array_equal(fused, tempered + apart)


def tempered_at_070(logits):
    return temper(logits, sampling_arrays([SamplingParams(temperature=0.7)] * len(logits), range(len(logits)), (), 31))
