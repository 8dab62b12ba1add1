"""Architecture smollm3: SmolLM3; no key says that every fourth layer has no rotary positions."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, add_turn_ends, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "no_rope_layer_interval": 4,
    }
    return add_turn_ends(config, reader, ("<|im_end|>",))


SMOLLM3 = Architecture(
    name="smollm3",
    translate=_translate,
    top=TOP,
    block=BLOCK,
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)
