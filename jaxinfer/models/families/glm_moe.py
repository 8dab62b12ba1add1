"""GLM-4.5 to 4.7 and Solar Open: after dense layers, if any, experts in groups beside a shared one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.grouped_experts import Usual, read_grouped_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
)
_SOLAR = sizes(196608, 4096, 1280, 48, 64, 8, 128, 131072)  # no layer has the third number
_SOLAR_EXPERTS = Usual((128, 8, 1280))
_EXPERTS = Usual((128, 8, 1408), dense=1)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` glm4_moe; its layers that predict further tokens are left out."""
    reader = ConfigReader(config, family="glm4_moe")
    decoder = read_llama_keys(
        reader, "glm4_moe", _DEFAULTS, norm_eps=("rms_norm_eps", 1e-5), rope=partial(read_rope, partial=0.5)
    )
    experts = read_grouped_experts(reader, decoder.num_layers, _EXPERTS, "sigmoid")
    bias = reader.boolean("attention_bias", default=False)
    norm = "head" if reader.boolean("use_qk_norm", default=False) else None
    return reader.finish(replace(decoder, experts=experts, qkv_bias=bias, qk_norm=norm))


def translate_solar(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` solar_open: every layer has experts, no head is normed."""
    reader = ConfigReader(config, family="solar_open")
    rope = partial(read_rope, theta=1e6)
    decoder = read_llama_keys(reader, "solar_open", _SOLAR, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    experts = read_grouped_experts(reader, decoder.num_layers, _SOLAR_EXPERTS, "sigmoid")
    if experts is None or experts.layer_pattern != (True,) * decoder.num_layers:
        raise reader.refuse("first_k_dense_replace", "...", "in transformers all layers have experts")
    if reader.boolean("use_qk_norm", default=False):
        raise reader.refuse("use_qk_norm", True, "transformers norms no heads, whatever it says")
    return reader.finish(replace(decoder, experts=experts, qkv_bias=reader.boolean("attention_bias", default=False)))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    names = llama_names.tensor_names(config)
    later = rf"model\.layers\.{re.escape(str(config.num_layers))}\..*"
    names = replace(names, ignored=(*names.ignored, later))
    return names if config.experts is None else with_experts(config, names, shared="mlp.shared_experts")


SOLAR_OPEN = Family("solar_open", ("SolarOpenForCausalLM",), translate_solar, tensor_names)
GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), translate, tensor_names)
