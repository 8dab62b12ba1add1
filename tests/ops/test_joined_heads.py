"""On a TPU few query rows attend to all of a device's heads in one product; the numbers are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import choose_backend


def _inputs(new_tokens, num_heads, num_kv_heads):
    keys = jax.random.split(jax.random.key(3), 4)
    query_BTNH = jax.random.normal(keys[0], (2, new_tokens, num_heads, 16))
    keys_BSKH = jax.random.normal(keys[1], (2, 24, num_kv_heads * 16))
    values_BSKH = jax.random.normal(keys[2], (2, 24, num_kv_heads * 16))
    mask_BTS = jax.random.bernoulli(keys[3], 0.6, (2, new_tokens, 24)).at[0, 0].set(False)
    return query_BTNH, keys_BSKH, values_BSKH, mask_BTS


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 4), (4, 1)])
@pytest.mark.parametrize("kv_shards", [1, 2, 4])
def test_heads_that_share_a_product_attend_as_each_by_itself(num_heads, num_kv_heads, kv_shards):
    if num_kv_heads % kv_shards:
        kv_shards = num_kv_heads
    inputs = _inputs(3, num_heads, num_kv_heads)
    apart = choose_backend("float32", platform="cpu")
    joined = dataclasses.replace(choose_backend("float32", platform="tpu"), kv_shards=kv_shards)
    expected = attend(*inputs, 0.25, apart)
    np.testing.assert_allclose(attend(*inputs, 0.25, joined), expected, atol=2e-6)


def test_a_long_prompt_multiplies_no_zeros():
    """Where rows are many, products with zeros would cost as many times the work as there are heads."""
    backend = choose_backend("float32", platform="tpu")

    def operations(new_tokens: int) -> float:
        attend_jitted = jax.jit(lambda *inputs: attend(*inputs, 0.25, backend))
        cost = attend_jitted.lower(*_inputs(new_tokens, 4, 4)).compile().cost_analysis()
        return jnp.asarray(cost["flops"]) / new_tokens

    assert operations(256) < 0.6 * operations(8)
