"""Architectures command-r and cohere2: Command R, R+, Aya and R7B; rows stay in the folder's order."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma2 import list_layer_types
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_PERIOD = 4  # no key holds it


def _read(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "layer_norm_eps": reader.positive_float("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "logit_scale": reader.positive_float("logit_scale"),
    }


def _translate_command_r(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        **_read(reader, tensors),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors.names,
    }


def _translate_cohere2(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = _read(reader, tensors)
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        **config,
        "sliding_window": reader.positive_int("attention.sliding_window"),
        "layer_types": list_layer_types(config["num_hidden_layers"], _PERIOD),
    }


_PARTS = {part: name for part, name in BLOCK.items() if part != "ffn_norm"}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
COMMAND_R = Architecture(
    name="command-r",
    translate=_translate_command_r,
    top=TOP,
    block=MappingProxyType({**_PARTS, **_NORMS}),
    rope_divisors=(),
)
COHERE2 = Architecture(
    name="cohere2", translate=_translate_cohere2, top=TOP, block=MappingProxyType(_PARTS), rope_divisors=()
)
