"""Architecture granite: Granite 3, with factors for embedding, scores, residuals and logits."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def read_granite(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a dense model."""
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


GRANITE = Architecture(
    name="granite",
    translate=read_granite,
    top=TOP,
    block=BLOCK,
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)
