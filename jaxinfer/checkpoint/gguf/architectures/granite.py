"""Architectures granite and granitehybrid: Granite 3 and the dense models of Granite 4, with their factors."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

# Sizes of state-space layers, of which there are none.
_OF_HYBRIDS = tuple(
    f"ssm.{key}" for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def read_granite(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of Granite 3, with experts or without."""
    if not reader.boolean("rope.scaling.finetuned", default=True):
        raise reader.refuse("rope.scaling.finetuned", "false means no rotary positions, and Granite 3 has them")
    return _read(reader, tensors)


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a dense model; those of Granite 4 say what their hybrids have, too."""
    reader.skip(*_OF_HYBRIDS)
    config = read_granite(reader, tensors)
    width = reader.positive_int("expert_shared_feed_forward_length", default=config["intermediate_size"])
    return {**config, "intermediate_size": width, "attention_bias": "blk.0.attn_q.bias" in tensors.names}


def _read(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_derived_head_dim(reader)
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_multiplier": reader.positive_float("attention.scale", default=head_dim**-0.5),
        "embedding_multiplier": reader.positive_float("embedding_scale", default=1.0),
        "residual_multiplier": reader.positive_float("residual_scale", default=1.0),
        "logits_scaling": reader.positive_float("logit_scale", default=1.0),
    }


def _translate_hybrid(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a hybrid all of whose layers are attention, without experts."""
    reader.skip(*_OF_HYBRIDS)
    rotates = reader.boolean("rope.scaling.finetuned", default=True)
    config = _read(reader, tensors)
    width = reader.positive_int("expert_shared_feed_forward_length", default=config["intermediate_size"])
    return {
        **config,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_bias": "blk.0.attn_q.bias" in tensors.names,
        "shared_intermediate_size": width,
        "num_local_experts": 0,
    }


GRANITE = Architecture(
    name="granite",
    translate=_translate,
    top=TOP,
    block=BLOCK,
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)
GRANITE_HYBRID = Architecture(
    name="granitehybrid", translate=_translate_hybrid, top=TOP, block=BLOCK, interleaved=GRANITE.interleaved
)
