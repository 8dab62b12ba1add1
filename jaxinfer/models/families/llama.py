"""Llama 1, 2 and 3.x, SmolLM2, TinyLlama, Vicuna, OpenLlama, Falcon 3: what is saved as ``LlamaForCausalLM``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import LLAMA_SIZES, read_llama_keys
from jaxinfer.models.families.keys.llama_names import tensor_names


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` llama."""
    reader = ConfigReader(config, family="llama")
    decoder = read_llama_keys(reader, "llama", LLAMA_SIZES, bos_token_id=1, eos_token_ids=(2,))
    attention_bias = reader.boolean("attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    return reader.finish(replace(decoder, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=mlp_bias))


LLAMA = Family("llama", ("LlamaForCausalLM",), translate, tensor_names)
