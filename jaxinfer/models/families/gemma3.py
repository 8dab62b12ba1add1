"""Gemma 3: Gemma 2 with norms of queries and keys instead of soft-caps, and rotary positions of two bases.

The larger models come with a vision tower; only their text decoder is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gemma2
from jaxinfer.models.families.family import TEXT_ALONE, Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import (
    read_activation,
    read_attention_scale,
    read_gemma_keys,
    read_softcap,
    read_window_layers,
)
from jaxinfer.models.families.keys.rope import read_kind_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
)
_PERIOD = 6
# For each kind of layer, the key of transformers 4 for the base, and its default.
_BASES = MappingProxyType({"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)})
# The prefixes of the text decoder's tensors beside a vision tower.
_PREFIX, _OTHER_PREFIX = "language_model.model.", "model.language_model."
_IGNORED = (r"(model\.)?(vision_tower|multi_modal_projector)\..*", r"(language_model\.)?lm_head\.weight")


def translate_text(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gemma3_text."""
    reader = ConfigReader(config, family="gemma3_text")
    read_activation(reader)
    decoder = read_gemma_keys(reader, "gemma3_text", _DEFAULTS, partial(read_kind_rope, bases=_BASES))
    period = reader.positive_int("sliding_window_pattern", default=_PERIOD)
    if reader.has("layer_types"):  # transformers also writes the period beside it
        reader.positive_int("_sliding_window_pattern", default=period)
    local_rope = read_kind_rope(reader, decoder.max_position, decoder.head_dim, "sliding_attention", bases=_BASES)
    decoder = read_window_layers(reader, decoder, period, local_rope)
    if read_softcap(reader, "attn_logit_softcapping", None) is not None:
        why = "transformers ignores it for this family; write null"
        raise reader.refuse("attn_logit_softcapping", config["attn_logit_softcapping"], why)
    return reader.finish(
        replace(
            decoder,
            block="sandwich",
            qk_norm="head",
            attention_scale=read_attention_scale(reader),
            final_softcap=read_softcap(reader, "final_logit_softcapping", None),
        )
    )


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate the text decoder of a ``config.json`` of ``model_type`` gemma3."""
    reader = ConfigReader(config, family="gemma3")
    if reader.section("text_config") is None:
        raise UnsupportedModel("config.json (gemma3): text_config is missing")
    text = config["text_config"]
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        raise reader.refuse("text_config", text["model_type"], "its model_type must be gemma3_text")
    decoder = translate_text(text)
    if decoder.final_softcap is not None:
        why = "transformers ignores it beside a vision tower; write null"
        raise reader.refuse("text_config", {"final_logit_softcapping": decoder.final_softcap}, why)
    if not reader.boolean("tie_word_embeddings", default=True) or not decoder.tied_embeddings:
        raise reader.refuse("tie_word_embeddings", False, "with a vision tower the head must be the embedding")
    bos_token_id = reader.optional_token("bos_token_id", default=decoder.bos_token_id)
    eos_token_ids = reader.tokens("eos_token_id", default=decoder.eos_token_ids)
    return reader.finish(replace(decoder, family="gemma3", bos_token_id=bos_token_id, eos_token_ids=eos_token_ids))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a checkpoint with a vision tower."""
    names = gemma2.tensor_names(config).moved("model.", _PREFIX)
    return replace(names, ignored=_IGNORED, optional_prefix=_PREFIX, other_prefix=_OTHER_PREFIX, notice=TEXT_ALONE)


GEMMA3_TEXT = Family("gemma3_text", ("Gemma3ForCausalLM",), translate_text, gemma2.tensor_names)
GEMMA3 = Family("gemma3", ("Gemma3ForConditionalGeneration",), translate, tensor_names)
