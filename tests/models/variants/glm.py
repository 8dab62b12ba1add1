"""Variants of GLM-4, Command R and Command R7B: neighbouring lanes rotated, part of a head or all of it."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.granite import rotating
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    halves,
    partial_rope_to_version_4,
    rolled_kv_heads,
    rope,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_QKV = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
_COHERE = {**SIZES, "tie_word_embeddings": True}


def cohere2_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the keys of 4.48: a period, no list of layers."""
    config = rope_to_version_4(config)
    period = config.pop("layer_types").index("full_attention") + 1
    return {**config, "sliding_window_pattern": period}


VARIANTS: Mapping[str, Variant] = {
    "glm": Variant(
        {"head_dim": 16, "rms_norm_eps": 0.1},
        {
            **_QKV,
            "neighbouring lanes": halves,
            "partial rotation": rope(dim=16),
            "norm_eps": settings(norm_eps=1e-6),
            "grouping": rolled_kv_heads,
            "untied": embedding_as_head,
        },
        model_type="glm",
        to_version_4=partial_rope_to_version_4,
    ),
    "glm4": Variant(
        {"head_dim": 16, "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        {
            "neighbouring lanes": halves,
            "partial rotation": rope(dim=16),
            "theta": rope(theta=1e4),
            "post norms": settings(block="pre_norm"),
        },
        model_type="glm4",
        to_version_4=partial_rope_to_version_4,
    ),
    "cohere-qk_norm": Variant(
        {"use_qk_norm": True, "layer_norm_eps": 0.1, "logit_scale": 2.5},
        {
            "neighbouring lanes": halves,
            "norms of heads": settings(qk_norm=None),
            "query norm": zeroed("query_norm", "scale"),
            "key norm": zeroed("key_norm", "scale"),
            "mean": settings(norm="rms"),
            "norm_eps": settings(norm_eps=1e-6),
            "logit scale": settings(logit_scale=None),
            "theta": rope(theta=1e4),
            "grouping": rolled_kv_heads,
        },
        model_type="cohere",
        sizes=_COHERE,
    ),
    "cohere-bias-untied": Variant(
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.0},
        {**_QKV, "output bias": zeroed("attention", "output", "bias"), "untied": embedding_as_head},
        model_type="cohere",
    ),
    "cohere2": Variant(
        {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 2.5},
        {
            "neighbouring lanes": halves,
            "window": window(None),
            "width": window(15),
            "order of layers": swapped_kinds,
            "layers without rotation": rotating,
        },
        model_type="cohere2",
        sizes=_COHERE,
        to_version_4=cohere2_to_version_4,
    ),
}
