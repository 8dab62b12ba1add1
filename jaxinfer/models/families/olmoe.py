"""OLMoE: Llama with norms of all query and all key heads, and experts in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
    }
)
_SIZES = (("num_experts", 64), ("num_experts_per_tok", 8), ("intermediate_size", 2048))


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` olmoe; clipped projections are refused."""
    reader = ConfigReader(config, family="olmoe")
    decoder = read_llama_keys(reader, "olmoe", _DEFAULTS, eos_token_ids=(50279,), norm_eps=("rms_norm_eps", 1e-5))
    bias = reader.boolean("attention_bias", default=False)
    experts = read_experts(reader, _SIZES, normalised=reader.boolean("norm_topk_prob", default=False))
    return reader.finish(replace(decoder, qk_norm="all_heads", qkv_bias=bias, output_bias=bias, experts=experts))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    return with_experts(config, llama_names.tensor_names(config))


OLMOE = Family("olmoe", ("OlmoeForCausalLM",), translate, tensor_names)
