"""Architecture starcoder2: StarCoder2; a window, which the converter drops, is read where a key has it."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "norm_epsilon": reader.positive_float("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": reader.optional_int("attention.sliding_window"),
        "use_bias": "blk.0.attn_q.bias" in tensors.names,
    }


_PARTS = {**{part: name for part, name in BLOCK.items() if part != "ffn_gate"}, "ffn_up": "mlp.c_fc"}
STARCODER2 = Architecture(
    name="starcoder2",
    translate=_translate,
    top=MappingProxyType({**TOP, "output_norm.bias": "model.norm.bias"}),
    block=MappingProxyType({**_PARTS, "ffn_down": "mlp.c_proj"}),
)
