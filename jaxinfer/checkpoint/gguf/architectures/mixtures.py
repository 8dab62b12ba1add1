"""Architectures qwen2moe, qwen3moe, qwen3vlmoe, olmoe and granitemoe: experts everywhere. Mixtral's is llama."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.granite import read_granite
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.qwen2 import TURN_ENDS
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    add_turn_ends,
    read_derived_head_dim,
    read_head_dim,
    read_rotary,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.experts import STACKS, read_expert_counts, shared_parts
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_ATTENTION = MappingProxyType({part: name for part, name in BLOCK.items() if part not in _DENSE})
_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})


def _read(
    reader: MetadataReader,
    tensors: FileTensors,
    model_type: str,
    architecture: str,
    read_width: Callable[[MetadataReader], int],
) -> dict[str, Any]:
    head_dim = read_width(reader)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        **read_expert_counts(reader),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }


def _qwen2(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    widths = {
        "moe_intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.positive_int("expert_shared_feed_forward_length"),
    }
    config = _read(reader, tensors, "qwen2_moe", "Qwen2MoeForCausalLM", read_derived_head_dim)
    return add_turn_ends({**config, **widths, "norm_topk_prob": False}, reader, TURN_ENDS)


def _qwen3(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = _read(reader, tensors, "qwen3_moe", "Qwen3MoeForCausalLM", read_head_dim)
    widths = {"moe_intermediate_size": reader.positive_int("expert_feed_forward_length")}
    own = {"head_dim": read_head_dim(reader), "norm_topk_prob": True, "attention_bias": False}
    return add_turn_ends({**config, **widths, **own}, reader, TURN_ENDS)


def _qwen3_beside_images(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a text decoder: positions of images are one and the same number for text."""
    reader.skip("rope.dimension_sections", "n_deepstack_layers")
    return _qwen3(reader, tensors)


def _olmoe(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = _read(reader, tensors, "olmoe", "OlmoeForCausalLM", read_derived_head_dim)
    return {**config, "norm_topk_prob": False, "attention_bias": False}


def _granite(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = {**read_granite(reader, tensors), **read_expert_counts(reader, "num_local_experts")}
    width = reader.optional_int("expert_shared_feed_forward_length")
    if width is None:
        return {**config, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
    names = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    return {**config, **names, "shared_intermediate_size": width}


QWEN2_MOE = Architecture(
    name="qwen2moe",
    translate=_qwen2,
    top=TOP,
    block=MappingProxyType(
        {
            **_ATTENTION,
            **STACKS,
            **shared_parts("mlp.shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        }
    ),
)
QWEN3_MOE = Architecture(
    name="qwen3moe",
    translate=_qwen3,
    top=TOP,
    block=MappingProxyType({**_ATTENTION, **_NORMS, **STACKS, "ffn_gate_inp": "mlp.gate"}),
)
QWEN3_VL_MOE = Architecture(name="qwen3vlmoe", translate=_qwen3_beside_images, top=TOP, block=QWEN3_MOE.block)
OLMOE = Architecture(
    name="olmoe",
    translate=_olmoe,
    top=TOP,
    block=MappingProxyType({**_ATTENTION, **_NORMS, **STACKS, "ffn_gate_inp": "mlp.gate"}),
)
GRANITE_MOE = Architecture(
    name="granitemoe",
    translate=_granite,
    top=TOP,
    block=MappingProxyType(
        {
            **_ATTENTION,
            **STACKS,
            **shared_parts("shared_mlp"),
            "ffn_gate_inp": "block_sparse_moe.router.layer",
        }
    ),
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)
