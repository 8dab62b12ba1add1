"""Architectures glm4moe, dots1, ernie4_5-moe, hunyuan-moe, minimax-m2 and phimoe: mixtures of 2024 and 2025."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import HUNYUAN_NORMS, has_bias, read_relative
from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3, read_longrope
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    read_derived_head_dim,
    read_head_dim,
    read_rotated_part,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.experts import (
    FURTHER,
    SIGMOID,
    STACKS,
    read_expert_counts,
    shared_parts,
    without_further_layers,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
# What Phi-3.5-MoE's rotation multiplies by, of 131072 tokens, once 4096. The converter leaves it out and writes what
# Phi-3's would be at these lengths.
_PHI_LENGTHS, _PHI_MAGNITUDE = (131072, 4096), 1.243163121016122


def read_grouped(reader: MetadataReader) -> dict[str, Any]:
    """Return what the keys say of experts in groups, of which sigmoids choose."""
    return {
        **read_expert_counts(reader, "n_routed_experts", SIGMOID),
        "moe_intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "n_shared_experts": reader.optional_int("expert_shared_count"),
        "first_k_dense_replace": reader.optional_int("leading_dense_block_count") or 0,
        "routed_scaling_factor": reader.optional_float("expert_weights_scale") or 1.0,
        "norm_topk_prob": reader.boolean("expert_weights_norm", default=False),
        "n_group": reader.optional_int("expert_group_count") or 1,
        "topk_group": reader.optional_int("expert_group_used_count") or 1,
    }


def _glm4(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **without_further_layers(reader, read_sizes(reader, tensors)),
        **read_rotated_part(reader, head_dim),
        **read_grouped(reader),
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": has_bias(tensors, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors.names,
    }


def _dots1(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = {**read_relative(reader, tensors, "dots1", "Dots1ForCausalLM"), **read_grouped(reader)}
    # No key has a window, which no published file has either.
    return {**config, "hidden_act": "silu", "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def _ernie(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM")
    reader.skip("expert_shared_feed_forward_length")  # as wide as their number says
    counts, bias = read_expert_counts(reader), config.pop("attention_bias")
    return {
        **config,
        "hidden_act": "silu",
        "use_bias": bias,
        "moe_num_experts": counts["num_experts"],
        "moe_k": counts["num_experts_per_tok"],
        "moe_intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "moe_num_shared_experts": reader.optional_int("expert_shared_count") or 0,
        "moe_layer_start_index": reader.optional_int("leading_dense_block_count") or 0,
        "moe_layer_interval": reader.positive_int("interleave_moe_layer_step", default=1),
    }


def _hunyuan(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
    counts, width = read_expert_counts(reader), config["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if reader.positive_int(key, default=width) != width:
            raise reader.refuse(key, f"it must be feed_forward_length ({width})")
    return {
        **config,
        "hidden_act": "silu",
        "num_experts": counts["num_experts"],
        "moe_topk": counts["num_experts_per_tok"],
        "num_shared_expert": reader.positive_int("expert_shared_count", default=1),
    }


def _minimax(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    rotary = read_rotated_part(reader, head_dim)
    rotary_dim = int(rotary.pop("partial_rotary_factor") * head_dim)
    sizes = read_sizes(reader, tensors)
    width = reader.positive_int("expert_feed_forward_length", default=sizes["intermediate_size"])
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        **sizes,
        **rotary,
        **read_expert_counts(reader, "num_local_experts", SIGMOID),
        "intermediate_size": width,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }


def _phimoe(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim, sizes = read_derived_head_dim(reader), read_sizes(reader, tensors)
    lengths = (
        sizes["max_position_embeddings"],
        reader.positive_int("rope.scaling.original_context_length", default=4096),
    )
    scaling = read_longrope(reader, tensors, read_rotated_dim(reader, head_dim), *lengths)
    if scaling is not None:
        # `read_longrope` leaves out what follows from the lengths.
        is_stated = reader.has("rope.scaling.attn_factor") and "attention_factor" in scaling
        magnitude = reader.positive_float("rope.scaling.attn_factor", default=1.0)
        if lengths == _PHI_LENGTHS and not is_stated:
            magnitude = _PHI_MAGNITUDE
        scaling = {**scaling, "attention_factor": magnitude, "original_max_position_embeddings": lengths[1]}
    return {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        **sizes,
        **read_expert_counts(reader, "num_local_experts"),
        "rope_theta": reader.positive_float("rope.freq_base", default=10000.0),
        "rope_scaling": scaling,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "sliding_window": reader.optional_int("attention.sliding_window"),
        "attention_bias": has_bias(tensors, "attn_q"),
        "lm_head_bias": "output.bias" in tensors.names,
    }


def read_rotated_dim(reader: MetadataReader, head_dim: int) -> int:
    """Return how many lanes of a head rotate, which must be all."""
    if reader.positive_int("rope.dimension_count", default=head_dim) != head_dim:
        raise reader.refuse("rope.dimension_count", f"it must equal the head width {head_dim}")
    return head_dim


_GROUPED = {
    **BLOCK,
    **_NORMS,
    **STACKS,
    **shared_parts("mlp.shared_experts"),
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_GLM4 = {**_GROUPED, **FURTHER, "post_attention_norm": "post_attention_layernorm"}
_ATTENTION = {part: name for part, name in BLOCK.items() if part not in ("ffn_gate", "ffn_up", "ffn_down")}
_ERNIE = {**BLOCK, **STACKS, **shared_parts("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"}
_HUNYUAN = {**_ATTENTION, **HUNYUAN_NORMS, **STACKS, **shared_parts("mlp.shared_mlp"), "ffn_gate_inp": "mlp.gate.wg"}
_MINIMAX = {**_ATTENTION, **_NORMS, **STACKS, "ffn_gate_inp": "block_sparse_moe.gate"}
_PHIMOE = {**_ATTENTION, **STACKS, "ffn_gate_inp": "block_sparse_moe.gate"}
_PHIMOE_TOP = {**TOP, "output_norm.bias": "model.norm.bias", "output.bias": "lm_head.bias"}
GROUPED_MIXTURES = (
    Architecture("glm4moe", _glm4, TOP, MappingProxyType(_GLM4), rope_divisors=()),
    Architecture("dots1", _dots1, TOP, MappingProxyType(_GROUPED), rope_divisors=()),
    Architecture(
        "ernie4_5-moe",
        _ernie,
        TOP,
        MappingProxyType({**_ERNIE, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}),
        rope_divisors=(),
    ),
    Architecture("hunyuan-moe", _hunyuan, TOP, MappingProxyType(_HUNYUAN), rope_divisors=()),
    Architecture(
        "minimax-m2",
        _minimax,
        TOP,
        MappingProxyType({**_MINIMAX, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}),
        rope_divisors=(),
    ),
    Architecture(
        "phimoe", _phimoe, MappingProxyType(_PHIMOE_TOP), MappingProxyType(_PHIMOE), rope_divisors=PHI3.rope_divisors
    ),
)
