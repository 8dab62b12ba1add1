"""Seed-OSS, Arcee, Helium and Ernie 4.5: Llama with biases of their own, another activation or neighbouring lanes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import interleaved, tensor_names
from jaxinfer.models.families.keys.rope import read_rope

_ARCEE_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared"}
_SEED_OSS = sizes(155136, 4096, 27648, 64, 80, 8, 128, 524288)
_ARCEE = sizes(32000, 2560, 18432, 32, 32, None, None, 4096)
_HELIUM = sizes(48000, 2560, 7040, 24, 20, 20, 128, 4096)
_ERNIE = sizes(103424, 1024, 3072, 18, 16, 2, 128, 131072)


def translate_seed_oss(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` seed_oss."""
    reader = ConfigReader(config, family="seed_oss")
    decoder = read_llama_keys(reader, "seed_oss", _SEED_OSS, 0, (2,))
    return reader.finish(
        replace(
            decoder,
            qkv_bias=reader.boolean("attention_bias", default=True),
            output_bias=reader.boolean("attention_out_bias", default=False),
            mlp_bias=reader.boolean("mlp_bias", default=False),
        )
    )


def translate_arcee(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` arcee: a squared ReLU without a gate."""
    reader = ConfigReader(config, family="arcee")
    activation = reader.choice("hidden_act", _ARCEE_ACTIVATIONS, default="relu2")
    decoder = read_llama_keys(
        reader, "arcee", _ARCEE, 128000, (128001,), activation=activation, norm_eps=("rms_norm_eps", 1e-5)
    )
    bias, mlp_bias = (reader.boolean(key, default=False) for key in ("attention_bias", "mlp_bias"))
    return reader.finish(replace(decoder, gated_mlp=False, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))


def translate_helium(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` helium."""
    reader = ConfigReader(config, family="helium")
    rope = partial(read_rope, theta=1e5)
    decoder = read_llama_keys(reader, "helium", _HELIUM, 1, (2,), norm_eps=("rms_norm_eps", 1e-8), rope=rope)
    bias, mlp_bias = (reader.boolean(key, default=False) for key in ("attention_bias", "mlp_bias"))
    return reader.finish(replace(decoder, qkv_bias=bias, mlp_bias=mlp_bias))


def translate_ernie(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` ernie4_5."""
    reader = ConfigReader(config, family="ernie4_5")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(
        reader, "ernie4_5", _ERNIE, 1, (2,), tied=True, norm_eps=("rms_norm_eps", 1e-5), rope=rope
    )
    bias = reader.boolean("use_bias", default=False)
    return reader.finish(replace(decoder, qkv_bias=bias, output_bias=bias, mlp_bias=bias))


def interleaved_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a relative whose rotary positions turn neighbouring lanes."""
    return interleaved(config, tensor_names(config))


SEED_OSS = Family("seed_oss", ("SeedOssForCausalLM",), translate_seed_oss, tensor_names)
ARCEE = Family("arcee", ("ArceeForCausalLM",), translate_arcee, tensor_names)
HELIUM = Family("helium", ("HeliumForCausalLM",), translate_helium, interleaved_names)
ERNIE = Family("ernie4_5", ("Ernie4_5ForCausalLM",), translate_ernie, interleaved_names)
