"""A decoder that is filled up for devices computes what its own does, by the definition in NumPy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.padding import pad_config, pad_parameter, parameter_sources
from tests.models.dense import dense_logits
from tests.toys import TINY_LLAMA, float32_backend

TOKENS = np.random.default_rng(0).integers(2, 258, 20).tolist()
SHARDS = 4
# Heads of their own keys, and groups: on four devices, how many of both there are.
HEADS = {"own": ((6, 6), (8, 8)), "copied": ((8, 2), (8, 4)), "filled": ((6, 2), (8, 4)), "joined": ((6, 3), (8, 4))}


@pytest.mark.parametrize("name", HEADS)
def test_zeros_and_copies_change_no_logits(name):
    (num_heads, num_kv_heads), expected = HEADS[name]
    config = replace(TINY_LLAMA, num_heads=num_heads, num_kv_heads=num_kv_heads, ffn_dim=63, qkv_bias=True)
    padded, backend = pad_config(config, SHARDS), float32_backend()
    assert (padded.num_heads, padded.num_kv_heads) == expected
    assert (padded.ffn_dim, padded.vocab_size, padded.vocab_padding) == (64, 512, 254)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype),
        abstract_params(config, backend),
    )
    filled = jax.tree.map(pad_parameter, params, parameter_sources(config, backend, SHARDS))
    logits_TV = dense_logits(padded, filled, TOKENS)
    assert logits_TV[:, : config.vocab_size].std() > 0.1
    np.testing.assert_allclose(logits_TV[:, : config.vocab_size], dense_logits(config, params, TOKENS), atol=1e-9)
    np.testing.assert_array_equal(logits_TV[:, config.vocab_size :], 0)
