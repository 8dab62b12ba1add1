"""Mellum 2: Qwen3-MoE with windows, and rotary positions of two bases."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families import qwen_moe
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_kind_rope
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

_DEFAULTS = sizes(98304, 2304, 7168, 28, 32, 4, 128, 131072)
_SIZES = (("num_experts", 64), ("num_experts_per_tok", 8), ("moe_intermediate_size", 896))
_BASES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {"full_attention": ("rope_theta", 5e5), "sliding_attention": ("rope_local_base_freq", 1e4)}
)
_LAYERS = {"dense": False, "sparse": True}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mellum; its layer that predicts a further token is left out."""
    reader = ConfigReader(config, family="mellum")
    decoder = read_llama_keys(reader, "mellum", _DEFAULTS, rope=partial(read_kind_rope, bases=_BASES))
    (whole,), count = decoder.layer_pattern, decoder.num_layers
    local = read_kind_rope(reader, decoder.max_position, decoder.head_dim, "sliding_attention", bases=_BASES)
    width, slides = read_window(reader, default=1024), read_layer_types(reader, count) or (False,) * count
    if any(slides) and width is None:
        raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
    windowed = LayerKind(local, width)
    sparse = reader.choices("mlp_layer_types", _LAYERS, count) if reader.has("mlp_layer_types") else (True,) * count
    experts = read_experts(reader, _SIZES, sparse, normalised=reader.boolean("norm_topk_prob", default=True))
    bias = reader.boolean("attention_bias", default=False)
    pattern = shortest_pattern(tuple(windowed if slide else whole for slide in slides))
    return reader.finish(
        replace(decoder, layer_pattern=pattern, experts=experts, qk_norm="head", qkv_bias=bias, output_bias=bias)
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Qwen3-MoE's."""
    names = qwen_moe.tensor_names(config)
    return replace(names, ignored=(*names.ignored, r"mtp\..*"))


MELLUM = Family("mellum", ("MellumForCausalLM",), translate, tensor_names)
