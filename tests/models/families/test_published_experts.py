"""The published configurations of models with experts are read, and what contradicts itself is refused."""

from dataclasses import replace

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts
from jaxinfer.models.families.registry import decoder_config, family_of
from jaxinfer.models.layers import cycles, index_in_kind

_COMMON = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
_TRAINED = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False}
MIXTRAL_8X7B = {
    **_COMMON, **_TRAINED, "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "vocab_size": 32000,
}  # fmt: skip
QWEN15_MOE_A27B = {
    **_COMMON, **_TRAINED, "architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151643, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
    "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B = {
    **_COMMON, **_TRAINED, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMOE_1B_7B = {
    **_COMMON, **_TRAINED, "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "vocab_size": 50304,
}  # fmt: skip
GRANITE_3_1B_A400M = {
    **_COMMON, **_TRAINED, "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096,
    "model_type": "granitemoe", "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "pad_token_id": 0, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True,
    "torch_dtype": "float32", "transformers_version": "4.46.0.dev0", "vocab_size": 49155,
}  # fmt: skip
GLM_45_AIR = {
    **_COMMON, "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
_GLM = Experts(128, 8, 1408, 1408, scoring="sigmoid", normalised=True, correction_bias=True)
PUBLISHED = {
    "Mixtral-8x7B": (MIXTRAL_8X7B, Experts(8, 2, 14336, normalised=True), 0),
    "Qwen1.5-MoE-A2.7B": (QWEN15_MOE_A27B, Experts(60, 4, 1408, shared_dim=5632, shared_gate=True), 0),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, Experts(128, 8, 768, normalised=True), 0),
    "OLMoE-1B-7B": (OLMOE_1B_7B, Experts(64, 8, 1024), 0),
    "Granite-3.0-1B-A400M": (GRANITE_3_1B_A400M, Experts(32, 8, 512, scoring="chosen_softmax"), 0),
    "GLM-4.5-Air": (GLM_45_AIR, _GLM, 1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, experts, num_dense = PUBLISHED[name]
    decoder = decoder_config(config)
    assert decoder.experts is not None
    assert replace(decoder.experts, layer_pattern=(True,)) == experts
    assert decoder.sparse_layers == (False,) * num_dense + (True,) * (decoder.num_layers - num_dense)
    assert (decoder.model_dim, decoder.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert (decoder.ffn_dim, decoder.num_heads) == (config["intermediate_size"], config["num_attention_heads"])
    names = family_of(config).tensor_names(decoder).block
    assert {"mlp.router.weights", *(f"mlp.experts.{part}" for part in ("gate", "up", "down"))} <= names.keys()


def test_layers_that_differ_in_their_experts_alone_share_a_cache_and_not_a_scan():
    decoder = decoder_config(GLM_45_AIR)
    assert len(decoder.kinds) == 1
    assert [index_in_kind(decoder, layer) for layer in (0, 1, 45)] == [(0, 0), (0, 1), (0, 45)]
    assert [tuple(cycle) for cycle in cycles(decoder)] == [(0, 1, 1), (1, 46, 1)]
    every_second = decoder_config({**QWEN3_30B_A3B, "decoder_sparse_step": 2})
    assert every_second.sparse_layers == (False, True) * 24
    assert [tuple(cycle) for cycle in cycles(every_second)] == [(0, 48, 2)]


@pytest.mark.parametrize("model_type", ["mixtral", "phimoe"])
def test_the_base_of_rotary_positions_may_be_left_unsaid(model_type):
    """It is then that of transformers."""
    (kind,) = decoder_config({"model_type": model_type}).layer_pattern
    assert kind.rope is not None
    assert kind.rope.theta == 1e6


def test_a_model_may_have_no_layer_with_experts():
    decoder = decoder_config({**QWEN3_30B_A3B, "mlp_only_layers": list(range(48))})
    assert (decoder.experts, decoder.ffn_dim) == (None, 6144)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is not supported: there are 8 experts"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts = 0"),
        (MIXTRAL_8X7B, {"no_such_router": 1}, "no_such_router"),
        (QWEN3_30B_A3B, {"num_local_experts": 8}, "num_local_experts = 8 is not supported: num_experts is 128"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "a list of numbers from 0 to 47"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window = True"),
        (QWEN15_MOE_A27B, {"layer_types": ["sliding_attention"] * 24}, "layers of experts have no windows"),
        (OLMOE_1B_7B, {"clip_qkv": "8"}, "clip_qkv = '8'"),
        (GLM_45_AIR, {"n_group": 3}, "n_group = 3"),
        (GLM_45_AIR, {"n_group": 32, "topk_group": 1}, "topk_group = 1 is not supported: of 32 groups"),
        (GLM_45_AIR, {"n_group": 2, "topk_group": 3}, "topk_group = 3"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
