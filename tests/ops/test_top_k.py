"""The best of long rows on a CPU, by blocks, against the best of all."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.ops.top_k import top_k
from tests.toys import float32_backend


@pytest.mark.parametrize(("size", "count"), [(16384, 6), (16384, 1), (5130, 10), (4097, 8), (512, 1)])
@pytest.mark.parametrize("kinds", [8, 5000])
def test_long_rows_have_the_same_best_in_the_same_order(size, count, kinds):
    rng = np.random.default_rng(size)
    # Few kinds of values make most places equals, of which the lowest come first.
    values = rng.integers(0, kinds, (3, 2, size)).astype(np.float32)
    values[0, 0], values[1, 1, 7], values[2, 0, 9:] = -np.inf, np.inf, -np.inf
    for array in (values, rng.integers(-kinds, 0, (4, size), np.int32)):
        best, places = top_k(jnp.asarray(array), count, float32_backend())
        expected, at = lax.top_k(jnp.asarray(array), count)
        np.testing.assert_array_equal(places, at)
        np.testing.assert_array_equal(best, expected)
        others = top_k(jnp.asarray(array), count, replace(float32_backend(), platform="tpu"))
        np.testing.assert_array_equal(others[1], at)
