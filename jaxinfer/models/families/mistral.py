"""Mistral 7B, Nemo and Small, and Ministral: Llama with its own head width and, in some, a window on some layers."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, Sharpening, shortest_pattern
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.rope import with_rope_section
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

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
# How fast queries grow, and a length that says nothing more than the one outside.
_BETA, _LENGTH = "llama_4_scaling_beta", "max_position_embeddings"
_MINISTRAL3 = sizes(131072, 4096, 14336, 34, 32, 8, 128, 262144)
_STRETCHED = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _BETA: 0.1,
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mistral; a null window means none."""
    reader = ConfigReader(config, family="mistral")
    decoder = read_llama_keys(reader, "mistral", _DEFAULTS, bos_token_id=1, eos_token_ids=(2,))
    (kind,) = decoder.layer_pattern
    windowed = LayerKind(kind.rope, read_window(reader, default=4096))
    return reader.finish(replace(decoder, layer_pattern=(windowed,)))


def translate_ministral(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` ministral: all layers have the window, or those of a list."""
    reader = ConfigReader(config, family="ministral")
    decoder = read_llama_keys(reader, "ministral", _DEFAULTS, bos_token_id=1, eos_token_ids=(2,))
    (kind,) = decoder.layer_pattern
    window, slides = read_window(reader, default=4096), read_layer_types(reader, decoder.num_layers)
    slides = (window is not None,) * decoder.num_layers if slides is None else slides
    if window is None and any(slides):
        raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
    layers = tuple(LayerKind(kind.rope, window if is_sliding else None) for is_sliding in slides)
    return reader.finish(replace(decoder, layer_pattern=shortest_pattern(layers)))


def translate_ministral3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` ministral3: queries grow with their place, in every layer."""
    config = with_rope_section(config, _STRETCHED)
    words, strength = dict(config), None
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name) or {}
        if "llama_4_scaling_beta" in section:
            outer = ConfigReader(section, "ministral3", f"{name}.")
            strength, original = outer.optional_float(_BETA), outer.positive_int("original_max_position_embeddings")
            words[name] = {key: value for key, value in section.items() if key not in (_BETA, _LENGTH)}
    reader = ConfigReader(words, family="ministral3")
    decoder = read_llama_keys(reader, "ministral3", _MINISTRAL3, 1, (2,), norm_eps=("rms_norm_eps", 1e-5))
    (kind,) = decoder.layer_pattern
    growth = Sharpening(strength, original, ahead=0) if strength else None
    kind = LayerKind(kind.rope, read_window(reader, default=None), sharpening=growth)
    return reader.finish(replace(decoder, layer_pattern=(kind,)))


MINISTRAL3 = Family("ministral3", ("Ministral3ForCausalLM",), translate_ministral3, tensor_names)
MISTRAL = Family("mistral", ("MistralForCausalLM",), translate, tensor_names)
MINISTRAL = Family("ministral", ("MinistralForCausalLM",), translate_ministral, tensor_names)
