"""The published configurations of models with latent attention."""

import math
from dataclasses import replace

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts
from jaxinfer.models.families.registry import decoder_config, family_of
from jaxinfer.models.latent import Latent

_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "v_head_dim": 128,
    "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": True, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "auto_map": {},
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
DEEPSEEK_V2_LITE = {
    **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "rope_theta": 10000,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V2 = {
    **DEEPSEEK_V2_LITE, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
}  # fmt: skip
DEEPSEEK_V3 = {
    **_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0, "ep_size": 1, "eos_token_id": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = {
    **DEEPSEEK_V3, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.0.0rc0",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip

_SIGMOID = {"scoring": "sigmoid", "normalised": True, "correction_bias": True}
PUBLISHED = {
    "DeepSeek-V2-Lite": (
        DEEPSEEK_V2_LITE,
        Latent(512, 128, 128),
        Experts(64, 6, 1408, 2816, group_score="best"),
        (1, 0.1 * 0.707 * math.log(40) + 1),
    ),
    "DeepSeek-V2": (
        DEEPSEEK_V2,
        Latent(512, 128, 128, 1536),
        Experts(160, 6, 1536, 3072, scale=16.0, groups=8, kept_groups=3, group_score="best"),
        (1, 0.1 * 0.707 * math.log(40) + 1),
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        Latent(512, 128, 128, 1536),
        Experts(256, 8, 2048, 2048, scale=2.5, groups=8, kept_groups=4, **_SIGMOID),
        (3, 0.1 * math.log(40) + 1),
    ),
    "Kimi-K2": (
        KIMI_K2,
        Latent(512, 128, 128, 1536),
        Experts(384, 8, 2048, 2048, scale=2.827, **_SIGMOID),
        (1, 0.1 * math.log(32) + 1),
    ),
    "GLM-4.7-Flash": (
        GLM_47_FLASH,
        Latent(512, 192, 256, 768),
        Experts(64, 4, 1536, 1536, scale=1.8, **_SIGMOID),
        (1, 1.0),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, latent, experts, (num_dense, magnitude) = PUBLISHED[name]
    decoder = decoder_config(config)
    assert decoder.latent == latent
    assert decoder.experts is not None
    assert replace(decoder.experts, layer_pattern=(True,)) == experts
    assert decoder.sparse_layers == (False,) * num_dense + (True,) * (decoder.num_layers - num_dense)
    assert (decoder.num_kv_heads, decoder.head_dim, decoder.num_heads) == (1, 576, config["num_attention_heads"])
    assert decoder.attention_scale == pytest.approx((latent.content_dim + 64) ** -0.5 * magnitude**2, rel=1e-12)
    assert decoder.longest_text == config["max_position_embeddings"]
    names = family_of(config).tensor_names(decoder).block
    assert ("attention.query_latent.kernel" in names) == (latent.query_rank is not None)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob = True is not supported: of softmax scores"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "known values are greedy, group_limited_greedy"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "known values are noaux_tc"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave = False"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported: there are 128 heads"),
        (DEEPSEEK_V3, {"head_dim": 128}, "head_dim = 128 is not supported: qk_rope_head_dim is 64"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (DEEPSEEK_V3, {"q_lora_rank": 0}, "q_lora_rank = 0"),
        (DEEPSEEK_V3, {"qk_head_dim": 128}, "its parts are 192 wide"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk"),
        (DEEPSEEK_V3, {"model_type": "deepseek_v32"}, "a model whose attention chooses among earlier tokens"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
