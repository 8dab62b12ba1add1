"""Latent attention: what the cache holds of a token, published forms of weights, and what does not take it."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer.cache.layouts import DENSE, PagedLayout, StreamingLayout
from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.memory import page_bytes
from jaxinfer.errors import InvalidOption
from jaxinfer.model_quantization import check_quantizable
from jaxinfer.models.adapters import adapter_shapes
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.models.padding import pad_config
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import random_model, random_prompts
from tests.models.families.test_published_latent import DEEPSEEK_V3
from tests.models.hugging_face import build_model, save_model
from tests.models.variants import VARIANTS

BLOCK = 16


@pytest.mark.parametrize("layout", [DENSE, PagedLayout(64), StreamingLayout(4, 60)])
def test_a_token_takes_one_row_a_layer(layout):
    """Of DeepSeek-V3 576 numbers, where keys and values of its 128 heads would be 40,960."""
    config, backend = decoder_config(DEEPSEEK_V3), choose_backend("bfloat16", "gpu")
    cache = jax.eval_shape(lambda: create_cache(config, 1, 64, backend, layout=layout))
    (part,) = cache.parts
    assert part.keys.shape[-1] == config.head_dim == 576
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in (part.keys, part.values))
    slots = part.keys.shape[1] * part.keys.shape[2]
    assert held == 61 * 576 * 2 * slots
    assert page_bytes(EngineConfig(page_size=64), Decoder(config, backend)) == 61 * 576 * 2 * 64


def test_heads_split_over_devices_and_rows_do_not():
    """Each device has some of the query heads, and a key/value head of its own that is a copy of the row."""
    config = pad_config(decoder_config(DEEPSEEK_V3), 8)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (128, 8, 576)
    assert pad_config(replace(config, num_heads=20, num_kv_heads=1), 8).num_heads == 24


@pytest.fixture(scope="module")
def tiny():
    return random_model("deepseek_v3")


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_an_engine_writes_what_the_model_writes(tiny, cache_dtype):
    prompts = random_prompts()[:3]
    if cache_dtype is not None:
        tiny = tiny.changed(tiny.params, backend=replace(tiny.backend, cache_dtype=cache_dtype))
    expected = [one.tokens for one in tiny.generate(prompts, max_new_tokens=12)]
    with tiny.engine(EngineConfig(max_rows=4, page_size=16)) as engine:
        handles = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        assert [tuple(handle.result().tokens) for handle in handles] == expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a model as DeepSeek-V3 is published, in blocks of floats of 8 bits, and what these stand for."""
    pytest.importorskip("torch")
    variant = VARIANTS["deepseek_v3-bias"]
    plain = save_model(build_model(variant), tmp_path_factory.mktemp("plain"), variant)
    published = tmp_path_factory.mktemp("published")
    config = json.loads((plain / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK] * 2}
    (published / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    coded, dense = {}, {}
    for name, array in load_file(plain / "model.safetensors").items():
        coded[name] = dense[name] = array
        if name.endswith("_proj.weight") and array.ndim == 2:
            rows, columns = array.shape
            grid = -(-rows // BLOCK), -(-columns // BLOCK)
            scales = (0.5 + np.random.default_rng(rows).random(grid)).astype(np.float32) / 64
            wide = np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)[:rows, :columns]
            coded[name] = (array / wide).astype(ml_dtypes.float8_e4m3fn)
            coded[name.replace(".weight", ".weight_scale_inv")] = scales
            dense[name] = coded[name].astype(np.float32) * wide
    save_file(dense, plain / "model.safetensors")
    save_file(coded, published / "model.safetensors")
    return plain, published


@pytest.mark.parity
@pytest.mark.slow
def test_blocks_of_floats_of_8_bits_are_what_they_stand_for(folders):
    plain, published = (jaxinfer.load(folder) for folder in folders)
    text = list(range(2, 40))
    expected = np.asarray(plain.logits([text]))
    np.testing.assert_allclose(np.asarray(published.logits([text])), expected, atol=1e-4 * expected.std())
    heads = [lm.params["blocks"]["layer_1"]["attention"]["key_heads"]["weights"] for lm in (plain, published)]
    np.testing.assert_array_equal(*map(np.asarray, heads))


def test_a_saved_model_is_the_same(folders, tmp_path):
    lm = jaxinfer.load(folders[0])
    lm.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved")
    assert again.config == lm.config
    assert again.fingerprint == lm.fingerprint
    assert jax.tree.all(jax.tree.map(jnp.array_equal, again.params, lm.params))


def test_adapters_are_those_of_the_merged_model(tmp_path):
    """Of tensors that hold several kernels, whose rows stand in other orders."""
    lm, rng = random_model("deepseek_v3"), np.random.default_rng(3)
    shapes = {"q_a_proj": (20, 32), "q_b_proj": (80, 20), "kv_a_proj_with_mqa": (24, 32), "o_proj": (32, 40)}
    shapes["kv_b_proj"] = (88, 16)
    tensors = {}
    for layer in range(2):
        for module, (outputs, inputs) in shapes.items():
            name = f"{PREFIX}model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = 0.1 * rng.standard_normal((outputs, 4)).astype(np.float32)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": [*shapes]}))
    save_file(tensors, tmp_path / WEIGHTS)
    lm.load_adapter("one", tmp_path)
    texts = [prompt[:16] for prompt in random_prompts()[:2]]
    live, plain = (np.asarray(lm.logits(texts, adapter=name)) for name in (["one", None], None))
    merged, _ = lm.loaded_adapters.merged("one")
    tokens_BT, lengths_B = np.zeros((2, 16), np.int32), np.array([len(text) for text in texts], np.int32)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text)] = text
    found = np.asarray(lm.programs.logits(merged, tokens_BT, lengths_B, np.zeros(2, np.int32)))
    np.testing.assert_allclose(live[0], found[0], atol=1e-4)
    np.testing.assert_array_equal(live[1, : len(texts[1])], plain[1, : len(texts[1])])
    assert np.abs(live[0] - plain[0]).max() > 0.1


def test_what_does_not_take_it_is_refused_in_a_line(folders):
    lm = jaxinfer.load(folders[0])
    refusals = {
        "latent attention of deepseek_v3 takes none in training": lambda: adapter_shapes(lm.config, 1, 4),
        "no method knows latent attention": lambda: check_quantizable(lm, "int8", "gptq"),
    }
    for line, ask in refusals.items():
        with pytest.raises(InvalidOption, match=line) as error:
            ask()
        assert "\n" not in str(error.value)
