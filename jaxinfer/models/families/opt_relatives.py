"""BioGPT and XGLM: OPT with scaled embeddings and GELU; XGLM adds sinusoids in the place of a position table."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import opt
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader

# OPT's words and values for absent keys.
_USUAL = MappingProxyType(
    {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "activation_function": "gelu",
        "bos_token_id": 0,
    }
)
_BIOGPT = MappingProxyType({**_USUAL, "vocab_size": 42384, "max_position_embeddings": 1024})
_XGLM = MappingProxyType({**_USUAL, "vocab_size": 256008, "max_position_embeddings": 2048})
_BIOGPT_WORDS = MappingProxyType({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
_XGLM_WORDS = MappingProxyType(
    {"d_model": "hidden_size", "num_layers": "num_hidden_layers", "attention_heads": "num_attention_heads"}
)


def translate_biogpt(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` biogpt; ``layer_norm_eps`` changes nothing in transformers."""
    reader, decoder = _read("biogpt", _BIOGPT, _BIOGPT_WORDS, config)
    return reader.finish(decoder)


def translate_xglm(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` xglm."""
    reader, decoder = _read("xglm", _XGLM, _XGLM_WORDS, config)
    if decoder.model_dim % 2 or decoder.model_dim < 4:
        raise reader.refuse("d_model", decoder.model_dim, "sines and cosines take an even width of at least 4")
    return reader.finish(replace(decoder, learned_positions=None, sinusoids=opt.OFFSET))


def biogpt_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: OPT's, but for what stands outside the layers."""
    names = _moved(opt.tensor_names(config), "biogpt.")
    top = {**names.top, "final_norm.scale": "biogpt.layer_norm.weight", "final_norm.bias": "biogpt.layer_norm.bias"}
    if not config.tied_embeddings:
        top["head.kernel"] = "output_projection.weight"
    return replace(names, top=top, ignored=(r"output_projection\.weight",))


def xglm_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: OPT's without positions, some of which were saved too."""
    names = _moved(opt.tensor_names(config), "model.")
    top = {**names.top, "final_norm.scale": "model.layer_norm.weight", "final_norm.bias": "model.layer_norm.bias"}
    return replace(names, top=top, ignored=(*names.ignored, r"model\.embed_positions\.weights"))


def _read(
    family: str, usual: Mapping[str, Any], words: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[ConfigReader, DecoderConfig]:
    reader = ConfigReader({**usual, **{words.get(key, key): value for key, value in config.items()}}, family)
    decoder = opt.read_opt_keys(reader, family)
    is_scaled = reader.boolean("scale_embedding", default=True)
    return reader, replace(decoder, embedding_scale=math.sqrt(decoder.model_dim) if is_scaled else None)


def _moved(names: TensorNames, prefix: str) -> TensorNames:
    return replace(names.moved("model.decoder.", prefix), optional_prefix="")


BIOGPT = Family("biogpt", ("BioGptForCausalLM",), translate_biogpt, biogpt_names)
XGLM = Family("xglm", ("XGLMForCausalLM",), translate_xglm, xglm_names)
