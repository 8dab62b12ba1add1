"""InternLM3, IQuest-Coder, CWM and Jais 2: Llama by other words, with windows, or with LayerNorm and a squared ReLU."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.rope import with_rope_section
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

_INTERNLM3 = sizes(128512, 4096, 10240, 48, 32, 2, 128, 32768)
_IQUEST = sizes(76800, 5120, 27648, 80, 40, 8, 128, 131072)
_CWM = sizes(128256, 6144, 21504, 64, 48, 8, 128, 131072)
_JAIS2 = sizes(150272, 3328, 26624, 32, 26, None, None, 8192)
_WORDS = MappingProxyType({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared", "relu": "relu", "silu": "silu"}
_STRETCHED = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)


def translate_internlm3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` internlm3."""
    reader = ConfigReader({_WORDS.get(key, key): value for key, value in config.items()}, family="internlm3")
    decoder = read_llama_keys(reader, "internlm3", _INTERNLM3, 1, (2,), norm_eps=("rms_norm_eps", 1e-5))
    return reader.finish(_with_biases(reader, decoder, default=False))


def translate_iquest(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` iquestcoder."""
    reader = ConfigReader(config, family="iquestcoder")
    decoder = read_llama_keys(reader, "iquestcoder", _IQUEST, 1, (2,), norm_eps=("rms_norm_eps", 1e-5))
    return reader.finish(_with_biases(reader, decoder, default=False))


def translate_cwm(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` cwm: all layers but every fourth have a window."""
    reader = ConfigReader(with_rope_section(config, _STRETCHED), family="cwm")
    ends = (128001, 128008, 128009)
    decoder = read_llama_keys(reader, "cwm", _CWM, 128000, ends, norm_eps=("rms_norm_eps", 1e-5))
    window, slides = read_window(reader, default=8192), read_layer_types(reader, decoder.num_layers)
    if slides is None:
        slides = tuple(layer % 4 != 0 for layer in range(decoder.num_layers))
    if window is None and any(slides):
        raise reader.refuse("sliding_window", None, "write the window's width, or layer_types without a window")
    (kind,) = decoder.layer_pattern
    kinds = tuple(LayerKind(kind.rope, window if one else None) for one in slides)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    return reader.finish(replace(decoder, layer_pattern=shortest_pattern(kinds), mlp_bias=mlp_bias))


def translate_jais2(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` jais2."""
    reader = ConfigReader(config, family="jais2")
    activation = reader.choice("hidden_act", _ACTIVATIONS, default="relu2")
    decoder = read_llama_keys(
        reader, "jais2", _JAIS2, 0, (150024,), activation=activation, norm_eps=("layer_norm_eps", 1e-5)
    )
    decoder = replace(decoder, norm="layer", gated_mlp=False)
    return reader.finish(_with_biases(reader, decoder, default=True))


def _with_biases(reader: ConfigReader, decoder: DecoderConfig, default: bool) -> DecoderConfig:
    bias, mlp_bias = (reader.boolean(key, default=default) for key in ("attention_bias", "mlp_bias"))
    return replace(decoder, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


INTERNLM3 = Family("internlm3", ("InternLM3ForCausalLM", "LlamaForCausalLM"), translate_internlm3, tensor_names)
IQUEST = Family("iquestcoder", ("IQuestCoderForCausalLM", "LlamaForCausalLM"), translate_iquest, tensor_names)
CWM = Family("cwm", ("CwmForCausalLM",), translate_cwm, tensor_names)
JAIS2 = Family("jais2", ("Jais2ForCausalLM",), translate_jais2, tensor_names)
