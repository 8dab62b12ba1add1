"""What Gemma alone has: rings for most layers, an embedding scale in the weights' dtype, a vision tower beside it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.ring import RingCache
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.ops.backend import choose_backend
from tests.models.families.test_published_gemma import GEMMA_3_1B
from tests.toys import float32_backend
from train.model.export import named_tensors

TEXT: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "sliding_window": 8, "sliding_window_pattern": 3,
}  # fmt: skip


def test_layers_with_a_window_allocate_no_more_than_it_and_the_headroom():
    config = decoder_config(TEXT)
    ring, dense = create_cache(config, batch=2, num_slots=512, backend=float32_backend(), headroom=5).parts
    assert isinstance(ring, RingCache)
    assert isinstance(dense, DenseCache)
    # Keys and values, layers, rows, slots (8 + 5, in tiles of 16), key/value heads, lanes, bytes.
    assert ring.keys.nbytes + ring.values.nbytes == 2 * 6 * 2 * 16 * 2 * 8 * 4
    assert dense.keys.nbytes + dense.values.nbytes == 2 * 2 * 2 * 512 * 2 * 8 * 4


def test_the_cache_of_gemma_3_1b_at_its_full_context_is_a_sixth_of_a_dense_one():
    config, backend = decoder_config(GEMMA_3_1B), choose_backend("bfloat16", "tpu")
    cache = jax.eval_shape(lambda: create_cache(config, 1, 32768, backend))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert total == 2 * (22 * 512 + 4 * 32768) * 256 * 2
    assert total < 2 * 26 * 32768 * 256 * 2 / 5


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 55.5), ("float32", 3072**0.5)])
def test_the_embedding_scale_is_rounded_as_the_weights_are(dtype, scale):
    backend = choose_backend(dtype, "cpu")
    config = decoder_config({**TEXT, "hidden_size": 3072})
    table_VD = jnp.ones((config.vocab_size, config.model_dim), dtype)
    params = {"embed": {"embedding": table_VD}}
    token = jnp.zeros((1, 1), jnp.int32)
    hidden_BTD = Decoder(config, backend).apply({"params": params}, token, token, method="embedded")
    np.testing.assert_array_equal(np.asarray(hidden_BTD), np.float32(scale))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_network_beside_a_vision_tower_is_read_however_it_is_spelled(tmp_path, prefix):
    config = {
        "model_type": "gemma3",
        "text_config": TEXT,
        "vision_config": {"hidden_size": 4},
        "mm_tokens_per_image": 4,
    }
    decoder = decoder_config(config)
    rng = np.random.default_rng(0)
    described = abstract_params(decoder, float32_backend())
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), described)
    named = {name: np.array(tensor) for name, tensor in named_tensors(decoder, params)}
    tensors = {name.replace("language_model.model.", prefix): tensor for name, tensor in named.items()}
    others = ("vision_tower.vision_model.head.probe", "multi_modal_projector.mm_soft_emb_norm.weight")
    outer = "model." if prefix.startswith("model.") else ""
    tensors |= {f"{outer}{name}": np.ones(3, np.float32) for name in others}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    lm = jaxinfer.load(tmp_path, dtype="float32")
    assert f"{prefix}norm.weight" in tensors
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), lm.params, params))
