"""The published configurations of Phi-3.5-MoE, dots.llm1, Ernie 4.5, MiniMax-M2, Hunyuan and Ministral 3 are read."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts, LayerKind, Rope, RopeScaling, Sharpening
from jaxinfer.models.families.registry import decoder_config, family_of

# The factors of 64 lanes are those of no model.
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
PHI_35_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "auto_map": {},
    "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072,
    "model_type": "phimoe", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0,
    "rope_scaling": {
        **_FACTORS, "long_mscale": 1.243163121016122, "short_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096, "type": "longrope",
    },
    "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
DOTS_LLM1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "eos_token_id": 151649,
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 32768,
    "model_type": "dots1", "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2,
    "n_group": None, "topk_group": None, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 152064,
}  # fmt: skip
ERNIE_45_21B_A3B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "num_attention_heads": 20,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "rotary_dim": 64, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
HUNYUAN_MT_7B: dict[str, Any] = {
    "add_classification_head": False, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attention_head_dim": 128, "bos_token_id": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "mlp_bias": False,
    "model_type": "hunyuan_v1_dense", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "rope_scaling": {
        "alpha": 100000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "use_rotary_pos_emb": True,
    "vocab_size": 128256,
}  # fmt: skip
HUNYUAN_A13B: dict[str, Any] = {
    **HUNYUAN_MT_7B, "architectures": ["HunYuanMoEV1ForCausalLM"], "intermediate_size": 3072,
    "model_type": "hunyuan_v1_moe", "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64,
    "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True, "vocab_size": 128167,
}  # fmt: skip
MINISTRAL_3_8B: dict[str, Any] = {
    "architectures": ["Ministral3ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
    "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
    },
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
}  # fmt: skip

_CORRECTED = {"normalised": True, "correction_bias": True}
EXPERTS: dict[str, tuple[dict[str, Any], Experts, int]] = {
    "Phi-3.5-MoE": (PHI_35_MOE, Experts(16, 2, 6400, scoring="sparse_mixer", spread=0.02), 0),
    "dots.llm1": (DOTS_LLM1, Experts(128, 6, 1408, 2816, scoring="sigmoid", scale=2.5, **_CORRECTED), 1),
    "Ernie-4.5-21B-A3B": (ERNIE_45_21B_A3B, Experts(64, 6, 1536, 3072, **_CORRECTED), 1),
    "MiniMax-M2": (MINIMAX_M2, Experts(256, 8, 1536, scoring="sigmoid", **_CORRECTED), 0),
    "Hunyuan-A13B": (HUNYUAN_A13B, Experts(64, 8, 3072, 3072, normalised=True), 0),
}
STRETCHED = Rope(10000.0 * 100000.0 ** (128 / 126), 128)
KINDS: dict[str, tuple[dict[str, Any], LayerKind]] = {
    "dots.llm1": (DOTS_LLM1, LayerKind(Rope(1e7, 128))),
    "Ernie-4.5-21B-A3B": (ERNIE_45_21B_A3B, LayerKind(Rope(5e5, 128))),
    "MiniMax-M2": (MINIMAX_M2, LayerKind(Rope(5e6, 64))),
    "Hunyuan-MT-7B": (HUNYUAN_MT_7B, LayerKind(STRETCHED)),
    "Hunyuan-A13B": (HUNYUAN_A13B, LayerKind(STRETCHED)),
    "Ministral-3-8B": (
        MINISTRAL_3_8B,
        LayerKind(
            Rope(1e6, 128, RopeScaling("yarn", 16.0, 16384, mscale=1.0, mscale_all_dim=1.0)),
            sharpening=Sharpening(0.1, 16384, ahead=0),
        ),
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_the_published_models(name):
    config, expected, num_dense = EXPERTS[name]
    decoder = decoder_config(config)
    assert decoder.experts is not None
    pattern = decoder.experts.layer_pattern
    assert decoder.experts == Experts(**{**vars(expected), "layer_pattern": pattern})
    assert decoder.sparse_layers == (False,) * num_dense + (True,) * (decoder.num_layers - num_dense)
    names = family_of(config).tensor_names(decoder).block
    assert {"mlp.router.weights", *(f"mlp.experts.{part}" for part in ("gate", "up", "down"))} <= names.keys()


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_those_of_the_published_models(name):
    config, kind = KINDS[name]
    assert decoder_config(config).layer_pattern == (kind,)


def test_the_last_layer_with_experts_may_be_left_unsaid():
    decoder = decoder_config(ERNIE_45_21B_A3B)
    for last in (None, -1):
        assert decoder_config({**ERNIE_45_21B_A3B, "moe_layer_end_index": last}) == decoder
    assert not decoder_config({**ERNIE_45_21B_A3B, "moe_layer_end_index": 26}).sparse_layers[27]


def test_phis_factors_have_one_magnitude_and_its_norms_have_biases():
    decoder = decoder_config(PHI_35_MOE)
    (kind,) = decoder.layer_pattern
    assert (decoder.norm, decoder.qkv_bias, decoder.output_bias, decoder.head_bias) == ("layer", True, True, True)
    assert kind.window == 131072
    assert kind.rope is not None
    assert kind.rope.scaling is not None
    assert (kind.rope.scaling.kind, kind.rope.scaling.attention_factor) == ("longrope", 1.243163121016122)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (PHI_35_MOE, {"rope_scaling": {**PHI_35_MOE["rope_scaling"], "long_mscale": 1.5}}, "long_mscale = 1.5"),
        (PHI_35_MOE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "with short_mscale and long_mscale alone"),
        (PHI_35_MOE, {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        (DOTS_LLM1, {"layer_types": ["sliding_attention"] * 62}, "sliding_window = None"),
        (DOTS_LLM1, {"n_group": 3}, "n_group = 3"),
        (ERNIE_45_21B_A3B, {"use_bias": True}, "use_bias = True"),
        (ERNIE_45_21B_A3B, {"moe_gate": "top2"}, "moe_gate = 'top2'"),
        (MINIMAX_M2, {"use_qk_norm": False}, "use_qk_norm = False"),
        (MINIMAX_M2, {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        (MINIMAX_M2, {"attn_type_list": [0, 1] * 31}, "attn_type_list = 0"),
        (HUNYUAN_MT_7B, {"rope_scaling": {"alpha": 10.0, "window": 3}}, "rope_scaling.window = 3"),
        (HUNYUAN_MT_7B, {"use_qk_norm": False}, "use_qk_norm = False"),
        (HUNYUAN_A13B, {"moe_topk": [8, 4] * 16}, "moe_topk = [8, 4"),
        (HUNYUAN_A13B, {"num_shared_expert": 2}, "num_shared_expert = 2"),
        (HUNYUAN_A13B, {"moe_intermediate_size": 64}, "moe_intermediate_size = 64"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
