"""Architecture olmo2: OLMo 2, with norms of queries, keys and each part's output."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
    }


_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LINEARS = {part: name for part, name in BLOCK.items() if not part.endswith("_norm")}
OLMO2 = Architecture(name="olmo2", translate=_translate, top=TOP, block=MappingProxyType({**_LINEARS, **_NORMS}))
