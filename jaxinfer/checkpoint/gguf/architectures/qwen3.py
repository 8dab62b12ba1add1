"""Architecture qwen3: the dense Qwen3 models, which normalise queries and keys."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.qwen2 import TURN_ENDS
from jaxinfer.checkpoint.gguf.config import FileTensors, add_turn_ends, read_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }
    return add_turn_ends(config, reader, TURN_ENDS)


def _translate_beside_images(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a text decoder: positions of images are one and the same number for text."""
    reader.skip("rope.dimension_sections", "n_deepstack_layers")
    return _translate(reader, tensors)


QWEN3 = Architecture(
    name="qwen3",
    translate=_translate,
    top=TOP,
    block=MappingProxyType({**BLOCK, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
)
QWEN3_VL = Architecture(name="qwen3vl", translate=_translate_beside_images, top=TOP, block=QWEN3.block)
