"""Youtu-LLM and MiniCPM3: latent attention beside dense parts; in MiniCPM3 factors, and halves that turn."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.latent_keys import latent_tensor_names, read_latent_keys
from jaxinfer.models.families.keys.llama_keys import sizes

_YOUTU = MappingProxyType(
    {
        **sizes(128256, 2048, 6144, 32, 16, 16, None, 131072),
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
)
_MINICPM3 = MappingProxyType(
    {
        **sizes(73448, 2560, 6400, 62, 40, 40, None, 32768),
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    }
)


def translate_youtu(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` youtu."""
    usual = {"tie_word_embeddings": True}
    reader = ConfigReader({**usual, **config}, family="youtu")
    return reader.finish(read_latent_keys(reader, "youtu", _YOUTU, 1e-6, (128000, 128001)))


def translate_minicpm3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` minicpm3."""
    usual = {"tie_word_embeddings": True}
    reader = ConfigReader({**usual, **config}, family="minicpm3")
    decoder = read_latent_keys(reader, "minicpm3", _MINICPM3, 1e-5, (1, 2))
    depth = (
        1.0
        if reader.is_null("scale_depth")
        else reader.positive_float("scale_depth", 1.4) / math.sqrt(decoder.num_layers)
    )
    base = decoder.model_dim if reader.is_null("dim_model_base") else reader.positive_int("dim_model_base", 256)
    return reader.finish(
        replace(
            decoder,
            embedding_scale=reader.positive_float("scale_emb", default=12.0),
            residual_scale=depth,
            logit_scale=base / decoder.model_dim,
            mlp_bias=reader.boolean("mlp_bias", default=False),
        )
    )


def minicpm3_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: DeepSeek's, of which the rows that rotate are in the order of halves."""
    names = latent_tensor_names(config)
    block: dict[str, Source] = {
        path: replace(source, rotary=None) if isinstance(source, Part) else source
        for path, source in names.block.items()
    }
    return replace(names, block=block)


YOUTU = Family("youtu", ("YoutuForCausalLM",), translate_youtu, latent_tensor_names)
MINICPM3 = Family("minicpm3", ("MiniCPM3ForCausalLM",), translate_minicpm3, minicpm3_names)
