"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: Qwen with experts in some layers or all; the first two share one, too."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts, read_sparse_layers
from jaxinfer.models.families.keys.expert_names import halves_of_stacks, with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.windows import read_layer_types

_QWEN2_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
    }
)
_QWEN3_DEFAULTS = MappingProxyType(
    {**_QWEN2_DEFAULTS, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
)
_QWEN2_SIZES = (("num_experts", 60), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1408))
_QWEN3_SIZES = (("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768))


def translate_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` qwen2_moe."""
    reader = ConfigReader(config, family="qwen2_moe")
    decoder = _read(reader, "qwen2_moe", _QWEN2_DEFAULTS, _QWEN2_SIZES)
    width = reader.positive_int("shared_expert_intermediate_size", default=5632)
    experts = decoder.experts and replace(decoder.experts, shared_dim=width, shared_gate=True)
    return reader.finish(replace(decoder, experts=experts, qkv_bias=reader.boolean("qkv_bias", default=True)))


def translate_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` qwen3_moe."""
    reader = ConfigReader(config, family="qwen3_moe")
    decoder = _read(reader, "qwen3_moe", _QWEN3_DEFAULTS, _QWEN3_SIZES)
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(replace(decoder, qk_norm="head", qkv_bias=bias, output_bias=bias))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    names = llama_names.tensor_names(config)
    return names if config.experts is None else with_experts(config, names)


def beside_images_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of Qwen3-VL's text decoder: all experts are in two, which are transposed where published."""
    names, inside = tensor_names(config), "model.layers.{layer}.mlp.experts."
    if config.experts is None:
        return names
    halves = halves_of_stacks(config, f"{inside}gate_up_proj", f"{inside}down_proj")
    return replace(names, others=(halves, *names.others))


def _read(reader: ConfigReader, family: str, defaults: Mapping[str, int], sizes: Any) -> DecoderConfig:
    decoder = read_llama_keys(reader, family, defaults)
    if reader.has("sliding_window"):  # a width, or 0, though no layer has a window
        reader.natural_int("sliding_window")
    if any(read_layer_types(reader, decoder.num_layers) or ()):
        raise reader.refuse("layer_types", "sliding_attention", "layers of experts have no windows")
    layers = read_sparse_layers(reader, decoder.num_layers)
    normalised = reader.boolean("norm_topk_prob", default=False)
    return replace(decoder, experts=read_experts(reader, sizes, layers, normalised=normalised))


QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), translate_qwen2, tensor_names)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), translate_qwen3, tensor_names)
