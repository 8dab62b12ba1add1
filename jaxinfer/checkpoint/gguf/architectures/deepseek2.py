"""Architecture deepseek2: DeepSeek-V2 and V3, Kimi K2 and all else that llama.cpp runs with latent attention."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_sizes
from jaxinfer.checkpoint.gguf.experts import FURTHER, SIGMOID, SOFTMAX, STACKS, shared_parts, without_further_layers
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.checkpoint.gguf.rope import read_rope_scaling

_ATTENTION = ("attn_k", "attn_v")
# The file has a tenth of what the logarithm of yarn's factor is multiplied by.
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    sizes = without_further_layers(reader, read_sizes(reader, tensors))
    if sizes["num_key_value_heads"] not in (1, sizes["num_attention_heads"]):
        raise reader.refuse("attention.head_count_kv", "latent attention has one head of keys, or as many as queries")
    # Some files of GLM-4.7-Flash do not say it; a choice is corrected where sigmoids choose.
    usual = SIGMOID if any(".exp_probs_b." in name for name in tensors.names) else SOFTMAX
    gating = reader.optional_int("expert_gating_func") or usual
    if gating not in (SOFTMAX, SIGMOID):
        raise reader.refuse("expert_gating_func", "only a softmax (1) and sigmoids (2) are implemented")
    is_third = gating == SIGMOID
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_third else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_third else "deepseek_v2",
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        **_read_attention(reader),
        **_read_experts(reader, is_third),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _read_attention(reader: MetadataReader) -> dict[str, Any]:
    """Read the widths of heads; older files have those of all heads, newer ones those of the one that is cached too."""
    rank, turning = reader.positive_int("attention.kv_lora_rank"), reader.positive_int("rope.dimension_count")
    is_split = reader.has("attention.key_length_mla")
    end = "_mla" if is_split else ""
    width, value = (reader.positive_int(f"attention.{part}_length{end}") for part in ("key", "value"))
    if width <= turning:
        raise reader.refuse(f"attention.key_length{end}", f"{turning} of it rotate, and some must not")
    if is_split:
        for part, expected in (("key", rank + turning), ("value", rank)):
            if reader.positive_int(f"attention.{part}_length", default=expected) != expected:
                raise reader.refuse(f"attention.{part}_length", f"a row of the cache makes it {expected}")
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    scaling = read_rope_scaling(reader, None, theta, turning, reader.positive_int("context_length"))
    multiplier = reader.optional_float(_LOG_MULTIPLIER)
    if scaling is not None and multiplier is not None:
        both = round(10 * multiplier, 6)
        scaling = {**scaling, "mscale": both, "mscale_all_dim": both}
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": reader.optional_int("attention.q_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        "v_head_dim": value,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _read_experts(reader: MetadataReader, is_third: bool) -> dict[str, Any]:
    groups, kept = (reader.optional_int(f"expert_group_{key}") or 1 for key in ("count", "used_count"))
    method = "noaux_tc" if is_third else "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "n_routed_experts": reader.positive_int("expert_count"),
        "num_experts_per_tok": reader.positive_int("expert_used_count"),
        "moe_intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "n_shared_experts": reader.optional_int("expert_shared_count"),
        "first_k_dense_replace": reader.optional_int("leading_dense_block_count") or 0,
        "routed_scaling_factor": reader.optional_float("expert_weights_scale") or 1.0,
        "norm_topk_prob": reader.boolean("expert_weights_norm", default=False),
        "topk_method": method,
        "n_group": groups,
        "topk_group": kept,
    }


DEEPSEEK2 = Architecture(
    name="deepseek2",
    translate=_translate,
    top=TOP,
    block=MappingProxyType(
        {
            **{part: name for part, name in BLOCK.items() if part not in _ATTENTION},
            **STACKS,
            **FURTHER,
            **shared_parts("mlp.shared_experts"),
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b": "mlp.gate.e_score_correction",
        }
    ),
)
