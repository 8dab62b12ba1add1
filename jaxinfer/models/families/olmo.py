"""OLMo 1 to 3: Llama with norms without weights, or with norms after each part and of all query and all key heads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_clip, read_llama_keys
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.rope import read_kind_rope, read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)
_BASES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {"full_attention": ("rope_theta", 5e5), "sliding_attention": ("rope_theta", 5e5)}
)
_PERIOD = 4


def translate_olmo(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` olmo."""
    reader = ConfigReader(config, family="olmo")
    # No key has the epsilon.
    decoder = read_llama_keys(reader, "olmo", _DEFAULTS, eos_token_ids=(50279,), norm_eps=("norm_eps", 1e-5))
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(
        replace(decoder, norm="plain_layer", clip_qkv=read_clip(reader), qkv_bias=bias, output_bias=bias)
    )


def translate_olmo2(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` olmo2."""
    reader = ConfigReader(config, family="olmo2")
    return reader.finish(_read(reader, "olmo2", read_rope))


def translate_olmo3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` olmo3: without ``layer_types``, every fourth layer sees all."""
    reader = ConfigReader(config, family="olmo3")
    decoder = _read(reader, "olmo3", partial(read_kind_rope, bases=_BASES))
    local_rope = read_kind_rope(reader, decoder.max_position, decoder.head_dim, "sliding_attention", bases=_BASES)
    return reader.finish(read_window_layers(reader, decoder, _PERIOD, local_rope))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's but for the norms."""
    norms = {
        "attention_post_norm.scale": "post_attention_layernorm.weight",
        "mlp_post_norm.scale": "post_feedforward_layernorm.weight",
    }
    return renamed(config, norms)


def _read(reader: ConfigReader, family: str, rope: Any) -> DecoderConfig:
    decoder = read_llama_keys(
        reader, family, _DEFAULTS, eos_token_ids=(50279,), norm_eps=("rms_norm_eps", 1e-5), rope=rope
    )
    bias = reader.boolean("attention_bias", default=False)
    return replace(decoder, block="output_norm", qk_norm="all_heads", qkv_bias=bias, output_bias=bias)


OLMO = Family("olmo", ("OlmoForCausalLM",), translate_olmo, tensor_names)
OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), translate_olmo2, tensor_names)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), translate_olmo3, tensor_names)
