"""Variants of OLMo 2 and OLMo 3: norms after each part, norms of all heads as one, windows, and yarn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.gemma import rope_of_layers
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 5e5}
_ROPES = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}


def norms_before(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Apply each part's norm to its inputs instead."""
    names = {"attention_post_norm": "attention_norm", "mlp_post_norm": "mlp_norm"}
    blocks = {
        layer: {names.get(name, name): node for name, node in block.items()}
        for layer, block in params["blocks"].items()
    }
    return replace(config, block="pre_norm"), {**params, "blocks": blocks}


def norms_of_heads(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Norm each head by itself, with the same weights."""
    return replace(config, qk_norm="own_head"), params


def olmo3_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the keys of 4.57: the scaling is that of full attention."""
    return rope_to_version_4({**config, "rope_parameters": config["rope_parameters"]["full_attention"]})


VARIANTS: Mapping[str, Variant] = {
    "olmo2": Variant(
        {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "norms after each part": norms_before,
            "norms of queries and keys": settings(qk_norm=None),
            "of all heads": norms_of_heads,
            "query norm": zeroed("query_norm", "scale"),
            "key norm": zeroed("key_norm", "scale"),
            "norm_eps": settings(norm_eps=1e-6),
            "theta": rope(theta=1e4),
            "grouping": rolled_kv_heads,
            "untied": embedding_as_head,
        },
        model_type="olmo2",
    ),
    "olmo2-bias-tied": Variant(
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        {
            **{f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")},
            "output bias": zeroed("attention", "output", "bias"),
        },
        model_type="olmo2",
    ),
    "olmo3": Variant(
        {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": _ROPES},
        {
            "window": window(None),
            "width": window(15),
            "order of layers": swapped_kinds,
            "yarn": rope_of_layers(False, scaling=None),
            "norms of queries and keys": settings(qk_norm=None),
        },
        model_type="olmo3",
        sizes={**SIZES, "num_key_value_heads": 4},
        to_version_4=olmo3_to_version_4,
    ),
}
