"""On a TPU few query rows attend to all of a device's heads in one product; the numbers are the same."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import choose_backend


def _inputs(new_tokens, num_heads, num_kv_heads):
    rng = np.random.default_rng(3)
    shapes = (2, new_tokens, num_heads, 16), (2, 24, num_kv_heads * 16), (2, 24, num_kv_heads * 16)
    mask_BTS = rng.random((2, new_tokens, 24)) < 0.6
    mask_BTS[0, 0] = False
    return *(rng.standard_normal(shape, np.float32) for shape in shapes), mask_BTS


attend_jitted = jax.jit(attend, static_argnums=(4, 5))
# Of as many devices as have a key/value head each.
LAYOUTS = ((4, 4, 1), (4, 4, 2), (4, 4, 4), (8, 4, 1), (8, 4, 2), (8, 4, 4), (4, 1, 1))
ORDINARY = LAYOUTS[2], LAYOUTS[3], LAYOUTS[4], LAYOUTS[6]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "kv_shards"),
    [pytest.param(*each, marks=() if each in ORDINARY else pytest.mark.slow) for each in LAYOUTS],
)
def test_heads_that_share_a_product_attend_as_each_by_itself(num_heads, num_kv_heads, kv_shards):
    inputs = _inputs(3, num_heads, num_kv_heads)
    apart = choose_backend("float32", platform="cpu")
    joined = dataclasses.replace(choose_backend("float32", platform="tpu"), kv_shards=kv_shards)
    expected = attend_jitted(*inputs, 0.25, apart)
    np.testing.assert_allclose(attend_jitted(*inputs, 0.25, joined), expected, atol=2e-6)


def test_a_long_prompt_multiplies_no_zeros():
    """Where rows are many, products with zeros would cost as many times the work as there are heads."""
    backend = choose_backend("float32", platform="tpu")

    def operations(new_tokens: int) -> float:
        cost = attend_jitted.lower(*_inputs(new_tokens, 4, 4), 0.25, backend).cost_analysis()
        return cost["flops"] / new_tokens

    assert operations(256) < 0.6 * operations(8)
