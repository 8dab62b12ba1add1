"""Mixtral: Mistral with experts in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.rope import read_rope
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
_SIZES = (("num_local_experts", 8), ("num_experts_per_tok", 2), ("intermediate_size", 14336))
_LINEARS = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mixtral."""
    reader = ConfigReader(config, family="mixtral")
    rope = partial(read_rope, theta=1e6)
    decoder = read_llama_keys(reader, "mixtral", _DEFAULTS, 1, (2,), norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    (kind,) = decoder.layer_pattern
    windowed = LayerKind(kind.rope, read_window(reader, default=None))
    return reader.finish(replace(decoder, layer_pattern=(windowed,), experts=read_experts(reader, _SIZES)))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    return with_experts(config, llama_names.tensor_names(config), mlp="block_sparse_moe", linears=_LINEARS)


MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), translate, tensor_names)
