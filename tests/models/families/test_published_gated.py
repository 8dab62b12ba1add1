"""The published AFMoE, DBRX and BitNet configurations are read, and what transformers does not do is refused."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts, LayerKind, Rope
from jaxinfer.models.families.registry import decoder_config

TRINITY_NANO = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_afmoe.AfmoeConfig"}, "global_attn_every_n_layers": 4, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "model_type": "afmoe", "moe_intermediate_size": 256, "mup_enabled": True,
    "n_group": 1, "num_attention_heads": 8, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 56, "num_key_value_heads": 2, "num_limited_groups": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
    "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False,
    "topk_group": 1, "transformers_version": "4.57.3", "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
_SECTION = {
    "return_dict": True, "output_hidden_states": False, "torch_dtype": None, "tie_word_embeddings": True,
    "max_length": 20, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "model_type": "",
}  # fmt: skip
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "attn_config": {**_SECTION, "attn_pdrop": 0, "clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "d_model": 6144, "emb_pdrop": 0.0,
    "ffn_config": {
        **_SECTION, "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4,
        "moe_jitter_eps": 0, "moe_loss_weight": 0.05, "moe_normalize_expert_weights": 1,
        "uniform_expert_assignment": False,
    },
    "initializer_range": 0.02, "max_seq_len": 32768, "model_type": "dbrx", "n_heads": 48, "n_layers": 40,
    "output_router_logits": False, "resid_pdrop": 0.0, "router_aux_loss_coef": 0.05, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.39.2", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip


def in_section(name: str, **changes: Any) -> dict[str, Any]:
    return {name: {**DBRX[name], **changes}}


def test_trinity_is_read():
    decoder = decoder_config(TRINITY_NANO)
    assert (decoder.block, decoder.qk_norm, decoder.attention_gate) == ("sandwich", "head", True)
    assert decoder.embedding_scale == 32.0
    assert decoder.layer_pattern == (*(LayerKind(Rope(1e4, 128), 2048),) * 3, LayerKind(None))
    assert decoder.sparse_layers == (False,) * 2 + (True,) * 54
    assert decoder.experts == Experts(
        128,
        8,
        256,
        shared_dim=256,
        scoring="sigmoid",
        normalised=True,
        scale=2.826,
        correction_bias=True,
        layer_pattern=decoder.sparse_layers,
    )


def test_dbrx_is_read():
    decoder = decoder_config(DBRX)
    assert (decoder.model_dim, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (6144, 48, 8, 128)
    assert (decoder.clip_qkv, decoder.norm, decoder.max_position) == (8.0, "scaled_layer", 32768)
    assert decoder.layer_pattern == (LayerKind(Rope(5e5, 128)),)
    assert decoder.experts == Experts(16, 4, 10752, normalised=True)


def test_what_a_file_leaves_out_is_what_transformers_has():
    bitnet, xglm = decoder_config({"model_type": "bitnet"}), decoder_config({"model_type": "xglm"})
    assert (bitnet.head_dim, bitnet.activation, bitnet.inner_norms) == (128, "relu_squared", True)
    assert (xglm.embedding_scale, xglm.sinusoids, xglm.learned_positions) == (32.0, 2, None)
    assert decoder_config({"model_type": "persimmon"}).qk_norm == "biased_head"
    assert decoder_config({"model_type": "openai-gpt"}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (TRINITY_NANO, {"n_group": 2}, "n_group = 2"),
        (TRINITY_NANO, {"route_norm": False}, "route_norm = False"),
        (TRINITY_NANO, {"score_func": "softmax"}, "score_func = 'softmax'"),
        (DBRX, in_section("ffn_config", moe_normalize_expert_weights=2.0), "moe_normalize_expert_weights = 2.0"),
        (DBRX, in_section("ffn_config", uniform_expert_assignment=True), "uniform_expert_assignment = True"),
        (DBRX, in_section("ffn_config", ffn_act_fn={"name": "gelu"}), "ffn_act_fn.name = 'gelu'"),
        (DBRX, in_section("attn_config", qk_ln=True), "qk_ln = True"),
        (DBRX, {"attn_config": 3}, "attn_config = 3"),
        (DBRX, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "contradicts the outer rope_theta"),
        ({"model_type": "bitnet"}, {"head_dim": 64}, "head_dim = 64"),
        ({"model_type": "granite_swa"}, {"layer_rope_theta": [1.0]}, "layer_rope_theta = [1.0]"),
        ({"model_type": "granite_swa"}, {"sliding_window": None}, "sliding_window = None"),
        ({"model_type": "solar_open"}, {"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({"model_type": "solar_open"}, {"use_qk_norm": True}, "use_qk_norm = True"),
        ({"model_type": "xglm"}, {"d_model": 33, "attention_heads": 3}, "d_model = 33"),
        ({"model_type": "openai-gpt"}, {"afn": "mish"}, "afn = 'mish'"),
        ({"model_type": "openai-gpt"}, {"n_inner": 7}, "n_inner = 7"),
        ({"model_type": "persimmon"}, {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
        ({"model_type": "mellum"}, {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
