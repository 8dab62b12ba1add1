"""Gemma 2 and VaultGemma: norms on both sides of each part, or before it alone, soft-caps, and windows in turn."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import (
    read_activation,
    read_attention_scale,
    read_gemma_keys,
    read_softcap,
    read_window_layers,
)

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    }
)
_PERIOD = 2


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gemma2."""
    return replace(_translate(config, "gemma2"), block="sandwich")


def translate_vaultgemma(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` vaultgemma, which has no norms after its parts."""
    return _translate(config, "vaultgemma")


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a Gemma 2 checkpoint: Llama's names except for the norms."""
    names, layer = llama_names.tensor_names(config), "model.layers.{layer}"
    norms = {
        "attention_post_norm.scale": f"{layer}.post_attention_layernorm.weight",
        "mlp_norm.scale": f"{layer}.pre_feedforward_layernorm.weight",
        "mlp_post_norm.scale": f"{layer}.post_feedforward_layernorm.weight",
    }
    return replace(names, block={**names.block, **norms})


def vaultgemma_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a VaultGemma checkpoint."""
    return llama_names.renamed(config, {"mlp_norm.scale": "pre_feedforward_layernorm.weight"})


def _translate(config: Mapping[str, Any], family: str) -> DecoderConfig:
    reader = ConfigReader(config, family=family)
    read_activation(reader)
    decoder = read_window_layers(reader, read_gemma_keys(reader, family, _DEFAULTS), _PERIOD)
    _check_window(reader)
    return reader.finish(
        replace(
            decoder,
            attention_scale=read_attention_scale(reader),
            attention_softcap=read_softcap(reader, "attn_logit_softcapping", 50.0),
            final_softcap=read_softcap(reader, "final_logit_softcapping", 30.0),
        )
    )


def _check_window(reader: ConfigReader) -> None:
    """Raise an error if a second key for the window, which the 9B and 27B files have, contradicts the first."""
    if not reader.has("sliding_window_size"):
        return
    window = reader.positive_int("sliding_window", default=4096)
    if (again := reader.positive_int("sliding_window_size")) != window:
        raise reader.refuse("sliding_window_size", again, f"it contradicts sliding_window ({window})")


GEMMA2 = Family("gemma2", ("Gemma2ForCausalLM",), translate, tensor_names)
VAULTGEMMA = Family("vaultgemma", ("VaultGemmaForCausalLM",), translate_vaultgemma, vaultgemma_names)
