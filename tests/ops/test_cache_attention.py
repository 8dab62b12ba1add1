"""A decoder on Pallas kernels, interpreted, against the same one on plain XLA."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cache_attention import Seen, attend_to_layer
from jaxinfer.ops.masks import causal_ancestors, visible_slots
from tests.toys import TINY_LLAMA, float32_backend, random_params

INTERPRETED = replace(float32_backend(), kernels="interpret")
# Layers with windows beside layers without, and bounded scores.
WINDOWED = replace(
    TINY_LLAMA,
    attention_softcap=8.0,
    num_layers=3,
    layer_pattern=(LayerKind(Rope(1e4, TINY_LLAMA.head_dim), 200), *TINY_LLAMA.kinds),
)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("config", [TINY_LLAMA, WINDOWED], ids=["plain", "windows"])
def test_kernels_give_the_logits_of_plain_products(config):
    """A prompt of more tokens than a tree may have, and a short one."""
    params = random_params(config)
    texts = [RNG.integers(2, 258, size).tolist() for size in (300, 5)]
    plain = LanguageModel(config, params, float32_backend()).logits(texts)
    found = LanguageModel(config, params, INTERPRETED).logits(texts)
    for row, text in enumerate(texts):
        one, other = np.asarray(plain[row, : len(text)]), np.asarray(found[row, : len(text)])
        assert one.std() > 1
        np.testing.assert_allclose(other, one, atol=1e-4 * one.std())


@pytest.mark.parametrize("strategy", ["autoregressive", "lookahead:window=3,ngram=3,guesses=3"])
def test_strategies_write_the_same_tokens_on_kernels(strategy):
    params = random_params(WINDOWED)
    prompts = [RNG.integers(2, 258, size).tolist() for size in (17, 3)]
    sampling = [SamplingParams(), SamplingParams(temperature=0.9, seed=5)]
    tokens = [
        [
            result.tokens
            for result in LanguageModel(WINDOWED, params, backend).generate(
                prompts, max_new_tokens=12, sampling=sampling, strategy=name
            )
        ]
        for backend, name in ((float32_backend(), "autoregressive"), (INTERPRETED, strategy))
    ]
    assert tokens[0] == tokens[1]


def test_a_tpu_attends_by_kernels_and_others_by_xla():
    assert choose_backend("bfloat16", "tpu").kernels == "pallas"
    assert {choose_backend("bfloat16", platform).kernels for platform in ("cpu", "gpu")} == {"xla"}
    assert jnp.dtype(INTERPRETED.cache_dtype) == jnp.float32


@pytest.mark.parametrize(
    ("lanes", "tokens", "shards", "is_kernel"),
    [(256, 1, 1, True), (256, 128, 1, True), (192, 1, 1, False), (256, 129, 1, False), (256, 1, 2, False)],
)
def test_kernels_serve_whole_tiles_small_trees_and_one_device(lanes, tokens, shards, is_kernel):
    backend = replace(choose_backend("bfloat16", "tpu"), kv_shards=shards)
    cache = jnp.zeros((2, 1, 256, lanes), jnp.bfloat16)
    query = jnp.zeros((1, tokens, lanes // 64, 64), jnp.bfloat16)
    start_B, ancestors_1TT = jnp.zeros((1,), jnp.int32), causal_ancestors(tokens)[None]
    seen = Seen(start_B, ancestors_1TT, None, visible_slots(start_B, ancestors_1TT, 256))
    traced = jax.make_jaxpr(lambda layer: attend_to_layer(query, cache, cache, layer, seen, 0.125, backend))(0)
    assert ("pallas_call" in str(traced)) == is_kernel
