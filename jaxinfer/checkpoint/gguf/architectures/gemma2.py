"""Architecture gemma2: soft-capped logits, norms on both sides of a sublayer, a window in every other layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma import TIED_TOP, read_gemma
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK
from jaxinfer.checkpoint.gguf.config import FileTensors, read_rotary
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

SANDWICH_BLOCK: Mapping[str, str] = MappingProxyType(
    {
        **BLOCK,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_LAYERS_OF_27B = 46


def list_layer_types(num_layers: int, period: int) -> list[str]:
    """Return each layer's attention type: the last of every ``period`` layers attends to the whole sequence."""
    return ["full_attention" if layer % period == period - 1 else "sliding_attention" for layer in range(num_layers)]


def read_layer_types(reader: MetadataReader, num_layers: int, period: int) -> list[str]:
    """Read which layers have a window: a list, or each but the last of a number of them."""
    key = "attention.sliding_window_pattern"
    if (slides := reader.flags(key, num_layers)) is not None:
        return ["sliding_attention" if one else "full_attention" for one in slides]
    return list_layer_types(num_layers, reader.positive_int(key, default=period))


def read_query_scalar(config: Mapping[str, Any], layers_of_27b: int) -> int:
    """Return the number whose root divides attention scores: no key holds it, llama.cpp infers it from the depth."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_gemma(reader, tensors)
    period = reader.positive_int("attention.sliding_window_pattern", default=2)
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **config,
        **read_rotary(reader, tensors, config["head_dim"]),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": read_query_scalar(config, _LAYERS_OF_27B),
        "attn_logit_softcapping": reader.positive_float("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": reader.positive_float("final_logit_softcapping", default=30.0),
        "sliding_window": reader.positive_int("attention.sliding_window", default=4096),
        "layer_types": list_layer_types(config["num_hidden_layers"], period),
    }


GEMMA2 = Architecture(
    name="gemma2", translate=_translate, top=TIED_TOP, block=SANDWICH_BLOCK, norm_shift=1.0, rope_divisors=()
)
