"""OLMoE and FlexOlmo: Llama, or OLMo 2, with norms of all query and all key heads, and experts in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import olmo
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_clip, read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

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
_FLEX_DEFAULTS = sizes(100352, 4096, 11008, 32, 32, None, None, 4096)
_FLEX_SIZES = (("num_experts", 7), ("num_experts_per_tok", 5), ("intermediate_size", 11008))
_SIZES = (("num_experts", 64), ("num_experts_per_tok", 8), ("intermediate_size", 2048))


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` olmoe."""
    reader = ConfigReader(config, family="olmoe")
    decoder = read_llama_keys(reader, "olmoe", _DEFAULTS, eos_token_ids=(50279,), norm_eps=("rms_norm_eps", 1e-5))
    bias = reader.boolean("attention_bias", default=False)
    experts = read_experts(reader, _SIZES, normalised=reader.boolean("norm_topk_prob", default=False))
    decoder = replace(decoder, qk_norm="all_heads", clip_qkv=read_clip(reader), experts=experts)
    return reader.finish(replace(decoder, qkv_bias=bias, output_bias=bias))


def translate_flex(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` flex_olmo: norms stand after each part."""
    reader = ConfigReader(config, family="flex_olmo")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(reader, "flex_olmo", _FLEX_DEFAULTS, eos_token_ids=(100257,), rope=rope)
    bias = reader.boolean("attention_bias", default=False)
    experts = read_experts(reader, _FLEX_SIZES, normalised=reader.boolean("norm_topk_prob", default=False))
    decoder = replace(decoder, block="output_norm", qk_norm="all_heads", experts=experts)
    return reader.finish(replace(decoder, qkv_bias=bias, output_bias=bias))


def flex_tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: OLMo 2's, and those of the experts."""
    return with_experts(config, olmo.tensor_names(config))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    return with_experts(config, llama_names.tensor_names(config))


FLEX_OLMO = Family("flex_olmo", ("FlexOlmoForCausalLM",), translate_flex, flex_tensor_names)
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), translate, tensor_names)
