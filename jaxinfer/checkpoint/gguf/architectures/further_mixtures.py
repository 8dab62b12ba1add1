"""Architectures exaone-moe, afmoe and dbrx: mixtures whose attention has windows, gates or bounds."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma2 import list_layer_types, read_layer_types
from jaxinfer.checkpoint.gguf.architectures.grouped_mixtures import read_grouped
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import read_relative
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.experts import (
    FURTHER,
    SIGMOID,
    STACKS,
    read_expert_counts,
    shared_parts,
    without_further_layers,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Of these layers the last one sees all; no key of AFMoE's says it.
_PERIOD = 4


def _exaone(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = without_further_layers(reader, read_relative(reader, tensors, "exaone_moe", "ExaoneMoeForCausalLM"))
    reader.skip("expert_shared_feed_forward_length")  # as wide as their number says
    types = read_layer_types(reader, config["num_hidden_layers"], _PERIOD)
    return {
        **config,
        **read_grouped(reader),
        "hidden_act": "silu",
        "sliding_window": reader.positive_int("attention.sliding_window"),
        "layer_types": types,
    }


def _afmoe(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "afmoe", "AfmoeForCausalLM")
    return {
        **config,
        **read_expert_counts(reader, gating=SIGMOID),
        "hidden_act": "silu",
        "moe_intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "num_shared_experts": reader.optional_int("expert_shared_count") or 0,
        "num_dense_layers": reader.optional_int("leading_dense_block_count") or 0,
        "route_norm": reader.boolean("expert_weights_norm", default=True),
        "route_scale": reader.optional_float("expert_weights_scale") or 1.0,
        "mup_enabled": True,  # llama.cpp scales all embeddings
        "sliding_window": reader.positive_int("attention.sliding_window"),
        "layer_types": list_layer_types(config["num_hidden_layers"], _PERIOD),
    }


def _dbrx(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    epsilon = reader.positive_float("attention.layer_norm_epsilon", default=1e-5)
    if epsilon != 1e-5:
        raise reader.refuse("attention.layer_norm_epsilon", "DBRX's norms have 1e-05")
    sizes = read_sizes(reader, tensors)
    counts = read_expert_counts(reader)
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        **sizes,
        "rope_theta": read_rotary(reader, tensors, read_derived_head_dim(reader))["rope_theta"],
        "attn_config": {
            "kv_n_heads": sizes["num_key_value_heads"],
            "clip_qkv": reader.optional_float("attention.clamp_kqv"),
        },
        "ffn_config": {
            "ffn_hidden_size": sizes["intermediate_size"],
            "moe_num_experts": counts["num_experts"],
            "moe_top_k": counts["num_experts_per_tok"],
        },
    }


_EXAONE = {
    **BLOCK,
    **_NORMS,
    **STACKS,
    **FURTHER,
    **shared_parts("mlp.shared_experts"),
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.e_score_correction_bias",
}
_AFMOE = {
    **BLOCK,
    **_NORMS,
    **STACKS,
    **shared_parts("mlp.shared_experts"),
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias",
}
_DBRX_TOP = {**TOP, "token_embd.weight": "transformer.wte.weight", "output_norm.weight": "transformer.norm_f.weight"}
_DBRX = {
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "ffn_gate_inp": "ffn.router.layer",
    "ffn_gate_exps": "ffn.experts.mlp.w1",
    "ffn_up_exps": "ffn.experts.mlp.v1",
    "ffn_down_exps": "ffn.experts.mlp.w2",
}
FURTHER_MIXTURES = (
    Architecture("exaone-moe", _exaone, TOP, MappingProxyType(_EXAONE)),
    Architecture("afmoe", _afmoe, TOP, MappingProxyType(_AFMOE)),
    Architecture(
        "dbrx",
        _dbrx,
        MappingProxyType(_DBRX_TOP),
        MappingProxyType(_DBRX),
        layers="transformer.blocks",
        rope_divisors=(),
    ),
)
