"""GGUF metadata gives the configuration that the model's Hugging Face folder has, or is refused by name."""

import numpy as np
import pytest

from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel
from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.families import llama
from tests.checkpoint.gguf import files


def decoder_config(tmp_path, keys=None, tensors=None):
    tensors = files.gguf_tensors(files.hf_tensors()) if tensors is None else tensors
    return llama.translate(open_gguf(files.write_gguf(tmp_path / "m.gguf", tensors, keys=keys)).config)


def rope_scaling(tmp_path, keys=None, tensors=None) -> RopeScaling | None:
    """Return the scaling that all layers share."""
    (kind,) = decoder_config(tmp_path, keys, tensors).layer_pattern
    assert kind.rope is not None
    return kind.rope.scaling


def converter_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Compute the rope_freqs tensor in float32 with the branches of llama.cpp's converter."""
    made = []
    for exponent in np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim):
        wavelength = np.float32(2 * np.pi) * np.float32(theta) ** exponent
        if wavelength < original / high:
            made.append(1.0)
        elif wavelength > original / low:
            made.append(factor)
        else:
            smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
            made.append(1 / ((1 - smooth) / np.float32(factor) + smooth))
    return np.array(made, np.float32)


def test_every_size_is_translated(tmp_path):
    config = decoder_config(tmp_path)
    assert (config.vocab_size, config.num_layers, config.model_dim, config.ffn_dim) == (40, 2, 32, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 8, 128)
    # float32 numbers come back as the decimals that were meant.
    assert (config.norm_eps, config.layer_pattern[0].rope) == (1e-5, Rope(10000.0, 8))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_heads_and_biases_follow_from_the_tensors(tmp_path, tied, bias):
    config = decoder_config(tmp_path, tensors=files.gguf_tensors(files.hf_tensors(tied, bias)))
    assert (config.tied_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias) == (tied, bias, bias, False)


@pytest.mark.parametrize("dropped", ["attn_output", "attn_k", "attn_q"])
def test_llama_files_with_only_some_biases_are_refused(tmp_path, dropped):
    made = files.gguf_tensors(files.hf_tensors(bias=True))
    made = {name: values for name, values in made.items() if not name.endswith(f"{dropped}.bias")}
    with pytest.raises(UnsupportedModel, match=rf"have biases and {dropped} none"):
        decoder_config(tmp_path, tensors=made)


def test_absent_keys_take_the_defaults_of_the_format(tmp_path):
    absent = ("llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count", "llama.vocab_size")
    made = files.hf_tensors()
    tensors = {name: values for name, values in files.gguf_tensors(made).items() if "attn_k" not in name}
    config = decoder_config(tmp_path, dict.fromkeys(absent), tensors)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 8, 40)
    assert config.layer_pattern[0].rope == Rope(10000.0, 8)


def test_ends_of_turn_and_absent_ids_are_translated(tmp_path):
    turn = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert decoder_config(tmp_path, turn).eos_token_ids == (2, 7)
    absent = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"))
    config = decoder_config(tmp_path, absent)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    config = decoder_config(tmp_path, absent | {"tokenizer.ggml.model": "llama"})
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0, 128)),
        ({"factor": 2.5}, RopeScaling("linear", 2.5, 128)),
        ({"type": "linear", "factor": 1.0}, None),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
            RopeScaling("yarn", 4.0, 32, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling_keys_are_translated(tmp_path, keys, expected):
    prefixed = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    assert rope_scaling(tmp_path, prefixed) == expected


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "high", "original"),
    [
        (500000.0, 128, 8.0, 4.0, 8192),
        (500000.0, 64, 32.0, 4.0, 8192),
        (10000.0, 32, 4.0, 4.0, 64),
        # Llama 4 Scout's, which has no frequencies in between.
        (500000.0, 128, 16.0, 1.0, 8192),
    ],
)
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path, theta, head_dim, factor, high, original):
    made = files.gguf_tensors(files.hf_tensors())
    made = {name: values for name, values in made.items() if "attn" not in name}
    made["rope_freqs.weight"] = converter_factors(theta, head_dim, factor, 1.0, high, original)
    assert np.unique(made["rope_freqs.weight"]).size > 3 or high == 1.0
    keys = {"llama.rope.freq_base": theta, "llama.attention.key_length": head_dim}
    keys |= {"llama.attention.value_length": head_dim, "llama.rope.dimension_count": head_dim}
    expected = RopeScaling("llama3", factor, original, low_freq_factor=1.0, high_freq_factor=high)
    assert rope_scaling(tmp_path, keys, made) == expected


def test_other_rope_tensors_are_refused_and_ones_mean_no_scaling(tmp_path):
    made = files.gguf_tensors(files.hf_tensors())
    ones = np.ones(files.HEAD_DIM // 2, np.float32)
    assert rope_scaling(tmp_path, tensors=made | {"rope_freqs.weight": ones}) is None
    for wrong in ([1, 1, 3, 8], [1, 2, 1, 1], [1, 1, 1, np.inf], [1, 1, 1, np.nan], [0, 1, 1, 1], [1, 1, 8]):
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
            decoder_config(tmp_path, tensors=made | {"rope_freqs.weight": np.array(wrong, np.float32)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_used_count", 8),
        ("attention.sliding_window", 4096),
        ("logit_scale", 0.5),
        ("attention.scale", 0.1),
        ("a_key_of_tomorrow", "x"),
        ("rope.dimension_count", 4),
        ("attention.value_length", 16),
        ("attention.key_length", 7),
        ("attention.head_count", [4, 4]),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.5),
    ],
)
def test_a_key_that_changes_the_network_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(UnsupportedModel, match=rf"llama\.{key}") as error:
        decoder_config(tmp_path, {f"llama.{key}": value})
    assert "\n" not in str(error.value)


def test_keys_that_leave_the_network_alone_are_accepted(tmp_path):
    plain = decoder_config(tmp_path)
    keys = {"llama.expert_count": 0, "llama.rope.scaling.finetuned": True, "llama.logit_scale": 1.0, "other.key": 3}
    assert decoder_config(tmp_path, keys) == plain


@pytest.mark.parametrize("key", ["block_count", "context_length", "attention.layer_norm_rms_epsilon"])
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(InvalidCheckpoint, match=rf"llama\.{key} is missing"):
        decoder_config(tmp_path, {f"llama.{key}": None})


def test_a_special_token_that_is_no_id_is_named(tmp_path):
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.ggml\.eos_token_id = 'x'"):
        decoder_config(tmp_path, {"tokenizer.ggml.eos_token_id": "x"})
