"""Architecture olmo2: OLMo 2 and 3, with norms of queries, keys and each part's output; OLMo 3 has windows."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma2 import read_layer_types
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_PERIOD = 4


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = _read(reader, tensors)
    if (window := reader.optional_int("attention.sliding_window")) is None:
        return config
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    own = reader.positive_float("rope.freq_base_swa", default=theta)
    return {
        **config,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": read_layer_types(reader, config["num_hidden_layers"], _PERIOD),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": own},
        },
    }


def _read(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors.names,
    }


_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LINEARS = {part: name for part, name in BLOCK.items() if not part.endswith("_norm")}
OLMO2 = Architecture(name="olmo2", translate=_translate, top=TOP, block=MappingProxyType({**_LINEARS, **_NORMS}))
