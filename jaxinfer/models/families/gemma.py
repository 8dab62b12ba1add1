"""Gemma 1: Llama with wide heads, scaled embeddings and a GELU gate."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_gemma_keys
from jaxinfer.models.families.keys.llama_names import tensor_names

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    }
)
# The first files say gelu but mean its tanh form. Some releases of transformers read hidden_activation first, and take
# null as the tanh form; others read hidden_act. Accepted is what means the same to all of them.
_ACTIVATIONS = MappingProxyType({"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gemma."""
    reader = ConfigReader(config, family="gemma")
    decoder = read_gemma_keys(reader, "gemma", _DEFAULTS)
    reader.choice("hidden_act", _ACTIVATIONS, default="gelu_pytorch_tanh")
    reader.choice("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, default="gelu_pytorch_tanh")
    return reader.finish(decoder)


GEMMA = Family("gemma", ("GemmaForCausalLM",), translate, tensor_names)
