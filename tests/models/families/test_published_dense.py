"""The published SmolLM3, Granite, GLM-4, Falcon 3, StableLM, StarCoder2 and Command R configurations are read."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.families.registry import decoder_config
from tests.toys import rope_of

_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
SMOLLM3_3B = {
    **_COMMON, "architectures": ["SmolLM3ForCausalLM"], "eos_token_id": 128012, "hidden_size": 2048,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0,
    "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
GRANITE_33_8B = {
    **_COMMON, "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125, "bos_token_id": 0,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 4096, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "tie_word_embeddings": True,
    "vocab_size": 49159,
}  # fmt: skip
GRANITE_4_MICRO = {
    **_COMMON, "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625,
    "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_size": 2560,
    "init_method": "mup", "intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
    "num_attention_heads": 40, "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "num_local_experts": 0, "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "rope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192, "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip
GLM_4_9B = {
    **_COMMON, "architectures": ["GlmForCausalLM"], "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696,
    "max_position_embeddings": 131072, "model_type": "glm", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
}  # fmt: skip
GLM_4_32B_0414 = {
    **GLM_4_9B, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False,
    "hidden_size": 6144, "intermediate_size": 23040, "max_position_embeddings": 32768, "num_attention_heads": 48,
    "num_hidden_layers": 61, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
}  # fmt: skip
FALCON3_7B = {
    **_COMMON, "activation": "swiglu", "architectures": ["LlamaForCausalLM"], "bos_token_id": 11, "eos_token_id": 11,
    "head_dim": 256, "hidden_size": 3072, "intermediate_size": 23040, "max_position_embeddings": 32768,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 12, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_theta": 1000042,
    "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip
STABLELM_2_16B = {
    "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 4096,
    "model_type": "stablelm", "layer_norm_eps": 1e-05, "num_attention_heads": 32, "num_hidden_layers": 24,
    "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "use_qkv_bias": True, "vocab_size": 100352,
}  # fmt: skip
STABLELM_2_12B = {
    **STABLELM_2_16B, "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "qk_layernorm": True, "use_parallel_residual": True,
    "use_qkv_bias": False,
}  # fmt: skip
STARCODER2_7B = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
    "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 4608, "initializer_range": 0.018042, "intermediate_size": 18432, "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05,
    "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32, "num_key_value_heads": 4,
    "residual_dropout": 0.1, "rope_theta": 1000000, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
COMMAND_R = {
    **_COMMON, "architectures": ["CohereForCausalLM"], "bos_token_id": 5, "eos_token_id": 255001, "hidden_size": 8192,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R_PLUS = {
    **COMMAND_R, "hidden_size": 12288, "intermediate_size": 33792, "logit_scale": 0.8333333333333334,
    "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 75000000.0,
    "use_qk_norm": True,
}  # fmt: skip
COMMAND_R7B = {
    **_COMMON, "architectures": ["Cohere2ForCausalLM"], "bos_token_id": 5, "cache_implementation": "hybrid",
    "eos_token_id": 255001, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
# The configuration, the width of a head and how much of it rotates, and the network's other words.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "SmolLM3-3B": (SMOLLM3_3B, 128, 128, {"tied_embeddings": True, "qkv_bias": False}),
    "Granite-3.3-8B": (
        GRANITE_33_8B, 128, 128,
        {"residual_scale": 0.22, "embedding_scale": 12.0, "logit_scale": 0.0625, "attention_scale": 0.0078125},
    ),
    "Granite-4.0-Micro": (
        GRANITE_4_MICRO, 64, 64, {"residual_scale": 0.22, "logit_scale": 0.1, "attention_scale": 0.015625}
    ),
    "GLM-4-9B": (GLM_4_9B, 128, 64, {"block": "pre_norm", "qkv_bias": True, "output_bias": False}),
    "GLM-4-32B-0414": (GLM_4_32B_0414, 128, 64, {"block": "sandwich", "qkv_bias": False}),
    "Falcon3-7B": (FALCON3_7B, 256, 256, {"block": "pre_norm", "family": "llama"}),
    "StableLM-2-1.6B": (STABLELM_2_16B, 64, 16, {"norm": "layer", "block": "pre_norm", "qkv_bias": True}),
    "StableLM-2-12B": (STABLELM_2_12B, 160, 40, {"block": "parallel", "qk_norm": "own_head", "qkv_bias": False}),
    "StarCoder2-7B": (
        STARCODER2_7B, 128, 128,
        {"norm": "layer", "mlp_bias": True, "gated_mlp": False, "activation": "gelu_tanh", "tied_embeddings": True},
    ),
    "Command-R": (COMMAND_R, 128, 128, {"norm": "scaled_layer", "logit_scale": 0.0625, "qk_norm": None}),
    "Command-R-Plus": (COMMAND_R_PLUS, 128, 128, {"logit_scale": 0.8333333333333334, "qk_norm": "own_head"}),
    "Command-R7B": (COMMAND_R7B, 128, 128, {"block": "parallel", "logit_scale": 0.25, "tied_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, head_dim, turning, words = PUBLISHED[name]
    decoder = decoder_config(config)
    assert (decoder.model_dim, decoder.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert (decoder.ffn_dim, decoder.num_heads) == (config["intermediate_size"], config["num_attention_heads"])
    assert (decoder.num_kv_heads, decoder.vocab_size) == (config["num_key_value_heads"], config["vocab_size"])
    assert decoder.head_dim == head_dim
    ropes = {kind.rope for kind in decoder.kinds if kind.rope is not None}
    assert ropes == {Rope(float(config["rope_theta"]), turning)}
    assert {word: getattr(decoder, word) for word in words} == words
    ends = config["eos_token_id"]
    assert decoder.eos_token_ids == (tuple(ends) if isinstance(ends, list) else (ends,))


def test_every_fourth_layer_of_smollm3_is_not_rotated():
    rope = Rope(5e6, 128)
    expected = (LayerKind(rope), LayerKind(rope), LayerKind(rope), LayerKind(None))
    assert decoder_config(SMOLLM3_3B).layer_pattern == expected
    for absent in ("no_rope_layers", "layer_types"):
        config = {key: value for key, value in SMOLLM3_3B.items() if key != absent}
        assert decoder_config(config).layer_pattern == expected


def test_the_layers_of_command_r7b_that_see_the_whole_text_are_not_rotated():
    local = LayerKind(Rope(5e4, 128), 4096)
    assert decoder_config(COMMAND_R7B).layer_pattern == (local, local, local, LayerKind(None))


def test_starcoder2_has_a_window_where_its_file_says_so():
    assert decoder_config(STARCODER2_7B).layer_pattern[0].window == 4096
    without = {key: value for key, value in STARCODER2_7B.items() if key != "sliding_window"}
    assert decoder_config(without).layer_pattern[0].window is None


def test_dense_granite_4_may_have_no_rotary_positions():
    assert decoder_config({**GRANITE_4_MICRO, "position_embedding_type": "nope"}).layer_pattern == (LayerKind(None),)
    assert rope_of(decoder_config(GRANITE_4_MICRO)) == Rope(1e7, 64)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]"),
        (SMOLLM3_3B, {"no_rope_layers": [2] * 36}, "a list of 36 zeros and ones"),
        (GRANITE_33_8B, {"residual_multiplier": 0}, "residual_multiplier = 0"),
        (GRANITE_33_8B, {"layer_types": ["mamba"] * 40}, "layer_types"),
        (GRANITE_4_MICRO, {"num_local_experts": 62}, "num_local_experts = 62 is not supported: hybrids with experts"),
        (GRANITE_4_MICRO, {"layer_types": ["mamba"] * 40}, "state-space layers are not supported"),
        (GRANITE_4_MICRO, {"layer_types": None}, "state-space layers are not supported"),
        (GLM_4_9B, {"partial_rotary_factor": 0.51}, "partial_rotary_factor = 0.51"),
        (STABLELM_2_16B, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (STARCODER2_7B, {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (COMMAND_R, {"logit_scale": 0}, "logit_scale = 0"),
        (COMMAND_R7B, {"use_qk_norm": True}, "use_qk_norm = True"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
