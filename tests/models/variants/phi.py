"""Variants of phi: rotation of part of a head, plain and stretched, with heads of their own keys and in groups."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    partial_rope_to_version_4,
    rolled_kv_heads,
    rope,
    settings,
    zeroed,
)

PHI_SIZES = {**SIZES, "num_key_value_heads": None}


def phi(config: Mapping[str, Any], without: Mapping[str, Any]) -> Variant:
    """Return a variant of phi."""
    return Variant(config, without, model_type="phi", sizes=PHI_SIZES, to_version_4=partial_rope_to_version_4)


VARIANTS: Mapping[str, Variant] = {
    "phi": phi(
        {"layer_norm_eps": 0.1},
        {
            "partial rotation": rope(dim=12),
            "theta": rope(theta=1e6),
            "norm_eps": settings(norm_eps=1e-5),
            "activation": settings(activation="relu"),
            "untied": embedding_as_head,
            "norm bias": zeroed("attention_norm", "bias"),
            "final norm bias": zeroed("final_norm", "bias"),
            "query bias": zeroed("query", "bias"),
            "key bias": zeroed("key", "bias"),
            "value bias": zeroed("value", "bias"),
            "output bias": zeroed("output", "bias"),
            "up bias": zeroed("up", "bias"),
            "down bias": zeroed("down", "bias"),
            "head bias": zeroed("head_bias", "bias"),
        },
    ),
    "phi-gqa-tied-linear": phi(
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.67,
            },
        },
        {
            "linear": rope(scaling=None),
            "partial rotation": rope(dim=6),
            "theta": rope(theta=1e4),
            "grouping": rolled_kv_heads,
            "head bias": zeroed("head_bias", "bias"),
        },
    ),
}
