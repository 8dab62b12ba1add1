"""Scores that fall with the distance: what keys hold of their positions, and what does not go with it."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.cache.layouts import StreamingLayout
from jaxinfer.engine.config import EngineConfig
from jaxinfer.errors import InvalidOption
from jaxinfer.models.alibi import key_lanes
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.config import Alibi, LayerKind, shallower
from jaxinfer.models.families.keys.slopes import mpt_slopes, usual_slopes
from jaxinfer.models.padding import pad_config
from jaxinfer.models.streaming import check_layout
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.compile import compile_programs
from tests.models.dense import dense_logits
from tests.planning.buffers import copies_of_the_cache
from tests.toys import TINY_LLAMA, random_params

SLOPES = usual_slopes(TINY_LLAMA.num_heads)
CONFIG = replace(
    TINY_LLAMA,
    num_kv_heads=TINY_LLAMA.num_heads,
    layer_pattern=(LayerKind(rope=None),),
    alibi=Alibi(SLOPES),
)
BLOOM = replace(
    CONFIG, vocab_size=250880, num_layers=30, model_dim=4096, ffn_dim=16384, num_heads=32, num_kv_heads=32,
    head_dim=128, max_position=2048, alibi=Alibi(usual_slopes(32)), norm="layer", gated_mlp=False, tied_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_parts_of_a_bias_are_a_float32_number(dtype):
    """Of positions up to 65,535 and of heads of every slope, in whatever the cache holds."""
    config = replace(CONFIG, num_heads=12, num_kv_heads=12, head_dim=128, alibi=Alibi(usual_slopes(12)))
    positions = np.array([[0, 1, 127, 255, 256, 257, 1000, 2047, 12345, 65535]])
    backend = choose_backend(dtype, "gpu")
    lanes_BTNP = key_lanes(config, backend, jnp.asarray(positions))
    assert lanes_BTNP is not None
    assert lanes_BTNP.dtype == dtype
    found = np.asarray(lanes_BTNP, np.float64).sum(axis=-1)[0] * 64 * 128**-0.5
    expected = positions[0][:, None] * np.array(usual_slopes(12))
    np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=1e-6)


def test_slopes_are_those_of_the_paper():
    """Eight heads have 1/2 to 1/256; of sixteen, every other one has one of these."""
    assert usual_slopes(8) == mpt_slopes(8, 8.0) == tuple(2.0**-power for power in range(1, 9))
    assert usual_slopes(16)[1::2] == usual_slopes(8)
    assert usual_slopes(12)[:8] == usual_slopes(8)
    assert usual_slopes(12)[8:] == usual_slopes(16)[:8:2]
    assert mpt_slopes(12, 8.0) == (usual_slopes(16)[1::2] + usual_slopes(16)[::2])[:12]


def test_heads_are_a_few_lanes_wider():
    """On a TPU so many that eight of them fill whole tiles."""
    for head_dim, on_tpu in ((64, 80), (128, 144)):
        config = replace(CONFIG, head_dim=head_dim)
        assert cached_width(config, choose_backend("bfloat16", "tpu")) == on_tpu
        assert cached_width(config, choose_backend("float32", "cpu")) == head_dim + 1
        assert cached_width(replace(config, alibi=None), choose_backend("bfloat16", "tpu")) == head_dim


def test_padded_heads_have_no_slope():
    padded = pad_config(replace(CONFIG, num_heads=6, num_kv_heads=6, alibi=Alibi(usual_slopes(6))), 4)
    assert padded.alibi == Alibi((*usual_slopes(6), 0.0, 0.0))
    assert padded.num_heads == padded.num_kv_heads == 8


def test_positions_in_keys_are_neither_moved_nor_rounded_to_bytes():
    with pytest.raises(InvalidOption, match="cache streaming: keys of llama hold their positions"):
        check_layout(CONFIG, StreamingLayout(4, 16))
    with pytest.raises(InvalidOption, match="cache_dtype: keys of llama hold their positions"):
        cached_width(CONFIG, choose_backend("float32", "cpu", cache_dtype="int8"))


def model(**how: Any) -> LanguageModel:
    params = random_params(CONFIG, seed=3)
    return LanguageModel(CONFIG, params, choose_backend("float32", **{"platform": "cpu", **how}), max_len=128)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    shared = rng.integers(2, 12, 40).tolist()
    return [[*shared, *rng.integers(2, 12, count).tolist()] for count in (3, 20, 9)]


def test_logits_are_those_of_the_definition():
    """For each head by its own slope, which no other form of model has."""
    lm, (ids, *_) = model(), prompts()
    expected_TV = dense_logits(CONFIG, lm.params, ids)
    found_TV = np.asarray(lm.logits([ids])[0])[: len(ids)]
    assert np.abs(found_TV - expected_TV).max() < 1e-4 * expected_TV.std()


@pytest.mark.exhaustive
def test_an_engine_with_shared_prefixes_writes_what_the_model_writes():
    """Its pages hold the positions of a prefix's keys, whoever reads them."""
    lm = model()
    expected = [one.tokens for one in lm.generate(prompts(), max_new_tokens=12)]
    with lm.engine(EngineConfig(max_rows=4, page_size=16)) as engine:
        for _ in range(2):
            handles = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts()]
            assert [tuple(handle.result().tokens) for handle in handles] == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["prompt_lookup:num_draft_tokens=4,min_ngram=1", "lookahead", "jacobi"])
def test_trees_have_the_positions_of_their_paths(strategy):
    lm = model()
    expected = [one.tokens for one in lm.generate(prompts(), max_new_tokens=12)]
    found = [one.tokens for one in lm.generate(prompts(), max_new_tokens=12, strategy=strategy)]
    assert found == expected


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_compiled_step_reads_the_cache_in_place():
    """By kernels; of an eighth more lanes than without."""
    config = shallower(BLOOM, 2)
    programs = [
        compile_programs(each, "v5e:1x1", batch=8, max_len=2048, prompt_tokens=512)
        for each in (config, replace(config, alibi=None))
    ]
    for name in ("decode", "prefill"):
        assert copies_of_the_cache(programs[0][name]) == []
        assert "tpu_custom_call" in programs[0][name].hlo
    more, less = (each["decode"].argument_bytes for each in programs)
    cache = 2 * 2 * 8 * 2048 * 4096 * 2
    assert 0.9 * cache / 8 < more - less < 1.1 * cache / 8
