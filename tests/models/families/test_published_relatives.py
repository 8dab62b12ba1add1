"""The published Seed-OSS, Helium, Ernie 4.5, Ministral, OLMo 1, Pythia and EXAONE 4 configurations are read."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.families.registry import decoder_config

_COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
SEED_OSS_36B = {
    **_COMMON, "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False,
    "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648,
    "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "vocab_size": 155136,
}  # fmt: skip
HELIUM_2B = {
    **_COMMON, "architectures": ["HeliumForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 128, "hidden_size": 2560, "intermediate_size": 7040, "max_position_embeddings": 4096,
    "mlp_bias": False, "model_type": "helium", "num_attention_heads": 20, "num_hidden_layers": 24,
    "num_key_value_heads": 20, "pad_token_id": 3, "rms_norm_eps": 1e-08, "rope_theta": 100000.0,
    "tie_word_embeddings": False, "vocab_size": 48000,
}  # fmt: skip
ERNIE_45_03B = {
    "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
    "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False, "use_cache": False, "vocab_size": 103424,
}  # fmt: skip
OLMO_1B = {
    **_COMMON, "architectures": ["OlmoForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "olmo",
    "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": 50304,
}  # fmt: skip
EXAONE_4_32B = {
    **_COMMON, "architectures": ["Exaone4ForCausalLM"], "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128,
    "hidden_size": 5120, "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "vocab_size": 102400,
}  # fmt: skip
EXAONE_4_12B = {
    **EXAONE_4_32B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096, "layer_types": None,
    "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 30, "sliding_window": None,
    "sliding_window_pattern": None, "tie_word_embeddings": True,
}  # fmt: skip
PYTHIA_69B = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": None, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50432,
}  # fmt: skip
MINISTRAL_8B = {
    **_COMMON, "architectures": ["MinistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 12288,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
    "max_position_embeddings": 32768, "model_type": "ministral", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "sliding_window": 32768,
    "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Seed-OSS-36B": (SEED_OSS_36B, {"qkv_bias": True, "output_bias": False, "head_dim": 128}),
    "Helium-1-2B": (HELIUM_2B, {"norm_eps": 1e-8, "head_dim": 128}),
    "Ernie-4.5-0.3B": (ERNIE_45_03B, {"tied_embeddings": True, "head_dim": 128}),
    "OLMo-1B": (OLMO_1B, {"norm": "plain_layer", "norm_eps": 1e-5, "head_dim": 128}),
    "OLMo-7B-0724": ({**OLMO_1B, "clip_qkv": 8.0}, {"clip_qkv": 8.0}),
    "EXAONE-4.0-32B": (EXAONE_4_32B, {"block": "output_norm", "qk_norm": "head", "head_dim": 128}),
    "EXAONE-4.0-1.2B": (EXAONE_4_12B, {"block": "output_norm", "tied_embeddings": True, "head_dim": 64}),
    "Ministral-8B": (MINISTRAL_8B, {"head_dim": 128, "qkv_bias": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, words = PUBLISHED[name]
    decoder = decoder_config(config)
    assert (decoder.family, decoder.model_dim) == (config["model_type"], config["hidden_size"])
    assert (decoder.ffn_dim, decoder.num_kv_heads) == (config["intermediate_size"], config["num_key_value_heads"])
    assert {word: getattr(decoder, word) for word in words} == words
    (theta,) = {kind.rope.theta for kind in decoder.kinds if kind.rope is not None}
    assert theta == config["rope_theta"]


def test_pythia_rotates_a_quarter_of_each_head_and_norms_twice():
    decoder = decoder_config(PYTHIA_69B)
    assert decoder.layer_pattern == (LayerKind(Rope(1e4, 32)),)
    assert (decoder.block, decoder.norm, decoder.num_kv_heads) == ("parallel_norms", "layer", 32)
    assert (decoder.qkv_bias, decoder.mlp_bias, decoder.gated_mlp, decoder.activation) == (True, True, False, "gelu")
    in_turn = decoder_config({**PYTHIA_69B, "use_parallel_residual": False})
    assert in_turn.block == "pre_norm"


def test_exaone_4_rotates_layers_with_a_window_or_where_there_is_none_all():
    local, *_, whole = decoder_config(EXAONE_4_32B).layer_pattern
    assert local.window == 4096
    assert local.rope is not None
    assert whole == LayerKind(rope=None)
    (kind,) = decoder_config(EXAONE_4_12B).layer_pattern
    assert kind.window is None
    assert kind.rope is not None


def test_ministral_has_its_window_on_all_layers_or_on_those_of_a_list():
    rope = Rope(1e8, 128)
    listed = (LayerKind(rope), *(LayerKind(rope, 32768),) * 3)
    assert decoder_config(MINISTRAL_8B).layer_pattern == listed
    assert decoder_config({**MINISTRAL_8B, "layer_types": None}).layer_pattern == (LayerKind(rope, 32768),)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (OLMO_1B, {"clip_qkv": -8.0}, "clip_qkv = -8.0"),
        (EXAONE_4_12B, {"layer_types": ["sliding_attention"] * 30}, "sliding_window = None"),
        (MINISTRAL_8B, {"sliding_window": None}, "sliding_window = None"),
        (PYTHIA_69B, {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        (SEED_OSS_36B, {"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
