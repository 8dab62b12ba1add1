"""Qwen2, Qwen2.5, Qwen3 and MiMo: Llama with biases on queries, keys and values, or with norms of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

_QWEN2_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    }
)
_QWEN3_DEFAULTS = MappingProxyType({**_QWEN2_DEFAULTS, "head_dim": 128})


def translate_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` qwen2."""
    reader = ConfigReader(config, family="qwen2")
    decoder = _read_windows(reader, read_llama_keys(reader, "qwen2", _QWEN2_DEFAULTS))
    return reader.finish(replace(decoder, qkv_bias=True))


def translate_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` qwen3."""
    reader = ConfigReader(config, family="qwen3")
    decoder = _read_windows(reader, read_llama_keys(reader, "qwen3", _QWEN3_DEFAULTS))
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(replace(decoder, qk_norm="head", qkv_bias=bias, output_bias=bias))


def translate_mimo(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mimo; its layers that predict further tokens are left out."""
    reader = ConfigReader(config, family="mimo")
    decoder = _read_windows(reader, read_llama_keys(reader, "mimo", _QWEN2_DEFAULTS))
    reader.natural_int("num_nextn_predict_layers", default=1)
    return reader.finish(replace(decoder, qkv_bias=reader.boolean("attention_bias", default=True)))


def mimo_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's; those of the layers that predict further tokens are no part of the decoder."""
    names = tensor_names(config)
    return replace(names, ignored=(*names.ignored, r"model\.mtp_layers\..*"))


def _read_windows(reader: ConfigReader, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with its layers' windows.

    ``layer_types`` takes precedence over ``max_window_layers``, the number of first layers that attend to the whole
    sequence. Files without windows still give a width, with ``use_sliding_window`` false.
    """
    stated, first = read_window(reader, default=4096), reader.natural_int("max_window_layers", default=28)
    window = stated if reader.boolean("use_sliding_window", default=False) else None
    slides = read_layer_types(reader, decoder.num_layers)
    if slides is None:
        slides = tuple(window is not None and layer >= first for layer in range(decoder.num_layers))
    if any(slides) and window is None:
        why = "it needs use_sliding_window and a sliding_window"
        raise reader.refuse("layer_types", "sliding_attention", why)
    (kind,) = decoder.layer_pattern
    layers = tuple(LayerKind(kind.rope, window if is_sliding else None) for is_sliding in slides)
    return replace(decoder, layer_pattern=shortest_pattern(layers))


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), translate_qwen2, tensor_names)
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), translate_qwen3, tensor_names)
MIMO = Family("mimo", ("MiMoForCausalLM",), translate_mimo, mimo_names)
