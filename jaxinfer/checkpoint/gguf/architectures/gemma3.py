"""Architecture gemma3: Gemma 3's text decoder, whose windowed layers have their own rotary positions."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma import read_gemma
from jaxinfer.checkpoint.gguf.architectures.gemma2 import SANDWICH_BLOCK, list_layer_types, read_query_scalar
from jaxinfer.checkpoint.gguf.architectures.llama import TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_rotary
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_LAYERS_OF_27B = 62
_PERIOD = 6
_LOCAL_THETA = 10000.0


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_gemma(reader, tensors)
    rotary = read_rotary(reader, tensors, config["head_dim"])
    # With yarn, llama.cpp also scales the windowed layers, and Hugging Face does not.
    if rotary["rope_scaling"] and rotary["rope_scaling"]["rope_type"] != "linear":
        raise reader.refuse("rope.scaling.type", "known values are none, linear")
    local_theta = reader.positive_float("rope.freq_base_swa", default=_LOCAL_THETA)
    period = reader.positive_int("attention.sliding_window_pattern", default=_PERIOD)
    window = reader.optional_int("attention.sliding_window")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": rotary["rope_theta"],
                **(rotary["rope_scaling"] or {}),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "query_pre_attn_scalar": read_query_scalar(config, _LAYERS_OF_27B),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": reader.optional_float("final_logit_softcapping"),
        "sliding_window": window,
        "layer_types": list_layer_types(config["num_hidden_layers"], period if window else 1),
    }


GEMMA3 = Architecture(
    name="gemma3",
    translate=_translate,
    top=TOP,
    block=MappingProxyType({**SANDWICH_BLOCK, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}),
    norm_shift=1.0,
    rope_divisors=(),
)
