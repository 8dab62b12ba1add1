"""Architecture bitnet: BitNet b1.58, whose matrices may stand beside one number each, by which they are multiplied."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_ACTIVATIONS = ("silu", "relu2")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    # Files of the first models do not say it; llama.cpp takes SiLU then, as they have.
    activation = reader.word("hidden_activation", default="silu")
    if activation not in _ACTIVATIONS:
        raise reader.refuse("hidden_activation", f"known values are {', '.join(_ACTIVATIONS)}")
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": activation,
        "attention_bias": False,
    }


BITNET = Architecture(
    name="bitnet",
    translate=_translate,
    top=TOP,
    block=MappingProxyType(
        {**BLOCK, "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    ),
    scaled=frozenset(part for part in BLOCK if not part.endswith("_norm")),
    rope_divisors=(),
)
