"""Architecture qwen2: Qwen2 and Qwen2.5, whose queries, keys and values have biases."""

from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    add_turn_ends,
    read_derived_head_dim,
    read_rotary,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    return add_turn_ends(config, reader, TURN_ENDS)


def _translate_beside_images(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a text decoder: positions of images are one and the same number for text."""
    reader.skip("rope.dimension_sections", "n_deepstack_layers")
    return _translate(reader, tensors)


QWEN2 = Architecture(name="qwen2", translate=_translate, top=TOP, block=BLOCK)
QWEN2_VL = Architecture(name="qwen2vl", translate=_translate_beside_images, top=TOP, block=QWEN2.block)
