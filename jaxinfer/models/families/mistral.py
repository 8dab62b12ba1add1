"""Mistral 7B, Nemo and Small: Llama with its own head width and, in the first release, a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.windows import read_window

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mistral; a null window means none."""
    reader = ConfigReader(config, family="mistral")
    decoder = read_llama_keys(reader, "mistral", _DEFAULTS, bos_token_id=1, eos_token_ids=(2,))
    (kind,) = decoder.layer_pattern
    windowed = LayerKind(kind.rope, read_window(reader, default=4096))
    return reader.finish(replace(decoder, layer_pattern=(windowed,)))


MISTRAL = Family("mistral", ("MistralForCausalLM",), translate, tensor_names)
