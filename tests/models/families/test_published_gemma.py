"""The published configurations of Gemma 1, 2 and 3 are read, and what transformers reads in two ways is refused."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig, Rope, RopeScaling
from jaxinfer.models.families.registry import decoder_config

GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
    "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA_7B = {
    **GEMMA_2B, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 24576,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16,
}  # fmt: skip
GEMMA_2_2B = {
    **{key: GEMMA_2B[key] for key in GEMMA_2B if key != "rope_scaling"},
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304, "intermediate_size": 9216, "model_type": "gemma2", "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.4",
}  # fmt: skip
GEMMA_2_9B = {
    **GEMMA_2_2B, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
    "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window_size": 4096,
}  # fmt: skip
GEMMA_2_27B = {
    **GEMMA_2_9B, "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
    "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA_3_270M = {
    **{key: GEMMA_3_1B[key] for key in GEMMA_3_1B if key not in ("sliding_window_pattern", "cache_implementation")},
    "_sliding_window_pattern": 6, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3, "use_bidirectional_attention": False,
    "transformers_version": "4.55.0.dev0", "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
}  # fmt: skip
_VISION = {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False}
_TEXT = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "text_config": _TEXT, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": _VISION,
}  # fmt: skip
_12B = {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_hidden_layers": 48}
GEMMA_3_12B = {**GEMMA_3_4B, "text_config": {**_TEXT, **_12B, "num_key_value_heads": 8}}
_27B = {"hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_hidden_layers": 62}
GEMMA_3_27B = {
    **GEMMA_3_4B,
    "text_config": {**_TEXT, **_27B, "head_dim": 128, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
}


def sizes(decoder: DecoderConfig) -> tuple[int, ...]:
    return decoder.num_layers, decoder.model_dim, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GEMMA_2B, (18, 2048, 8, 1, 256)), (GEMMA_7B, (28, 3072, 16, 16, 256)), (GEMMA_2_2B, (26, 2304, 8, 4, 256)),
        (GEMMA_2_9B, (42, 3584, 16, 8, 256)), (GEMMA_2_27B, (46, 4608, 32, 16, 128)),
        (GEMMA_3_1B, (26, 1152, 4, 1, 256)), (GEMMA_3_270M, (18, 640, 4, 1, 256)),
        (GEMMA_3_4B, (34, 2560, 8, 4, 256)), (GEMMA_3_12B, (48, 3840, 16, 8, 256)),
        (GEMMA_3_27B, (62, 5376, 32, 16, 128)),
    ],
)  # fmt: skip
def test_published_configurations_are_read(config, expected):
    decoder = decoder_config(config)
    assert sizes(decoder) == expected
    assert decoder.embedding_scale == expected[1] ** 0.5
    assert (decoder.norm, decoder.activation, decoder.tied_embeddings) == ("rms_plus_one", "gelu_tanh", True)
    ends = (1,) if config["eos_token_id"] == 1 else (1, 106)
    assert (decoder.bos_token_id, decoder.eos_token_ids) == (2, ends)


def test_gemma_2_alternates_windows_and_caps_scores_and_logits():
    decoder = decoder_config(GEMMA_2_27B)
    assert [kind.window for kind in decoder.layers[:4]] == [4096, None, 4096, None]
    assert (decoder.attention_softcap, decoder.final_softcap) == (50.0, 30.0)
    assert decoder.attention_scale == pytest.approx(1 / 12)
    assert decoder.block == "sandwich"
    uncapped = decoder_config({**GEMMA_2_2B, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (uncapped.attention_softcap, uncapped.final_softcap) == (None, None)


def test_gemma_3_has_a_base_for_each_kind_of_layer():
    stretched = Rope(1e6, 256, RopeScaling("linear", 8.0, 131072))
    for config, full_rope in ((GEMMA_3_1B, Rope(1e6, 256)), (GEMMA_3_4B, stretched)):
        decoder = decoder_config(config)
        local, full = decoder.kinds
        assert [layer for layer, kind in enumerate(decoder.layers) if kind == full] == list(
            range(5, decoder.num_layers, 6)
        )
        assert (local.rope, full.rope, full.window) == (Rope(1e4, 256), full_rope, None)
        assert (decoder.attention_softcap, decoder.final_softcap, decoder.qk_norm) == (None, None, "head")
    assert decoder_config(GEMMA_3_1B).kinds[0].window == 512


def test_what_a_text_config_omits_takes_the_defaults_of_transformers():
    decoder = decoder_config(GEMMA_3_4B)
    assert (decoder.family, decoder.vocab_size, decoder.max_position) == ("gemma3", 262208, 131072)
    assert decoder.attention_scale == 1 / 16
    assert decoder_config(GEMMA_3_27B).attention_scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (GEMMA_2B, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA_2B, {"hidden_act": "silu"}, "hidden_act"),
        (GEMMA_2B, {"head_dim": None}, "head_dim"), (GEMMA_2B, {"use_bidirectional_attention": True}, "use_bidir"),
        (GEMMA_2_2B, {"sliding_window_size": 2048}, "sliding_window_size"),
        (GEMMA_2_2B, {"sliding_window": None}, "sliding_window"),
        (GEMMA_2_2B, {"layer_types": ["full"]}, "layer_types"),
        (GEMMA_2_2B, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA_2_2B, {"hidden_activation": "silu"}, "hidden_activation"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3_1B, {"_sliding_window_pattern": 6}, "_sliding_window_pattern"),
        (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_3_1B, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"a": {}}}, "rope_"),
        (GEMMA_3_1B, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters.rope_"),
        (GEMMA_3_1B, {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_theta"),
        (GEMMA_3_4B, {"text_config": None}, "text_config"), (GEMMA_3_4B, {"text_config": {"model_type": "x"}}, "text"),
        (GEMMA_3_4B, {"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        (GEMMA_3_4B, {"text_config": {"tie_word_embeddings": False}}, "tie_word_embeddings"),
        (GEMMA_3_4B, {"text_config": {"num_experts": 2}}, "num_experts"),
        (GEMMA_3_4B, {"text_config": 3}, "text_config"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_or_ambiguous_is_refused_by_name(config, changes, key):
    with pytest.raises(UnsupportedModel, match=key) as error:
        decoder_config({**config, **changes})
    assert "\n" not in str(error.value)
