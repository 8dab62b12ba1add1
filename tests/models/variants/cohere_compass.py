"""Variants of Cohere Compass: layers of two kinds, each with rotary positions of its own or without any."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.gemma import rope_of_layers
from tests.models.variants.granite import rotating
from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.variant import (
    Variant,
    embedding_as_head,
    halves,
    rolled_kv_heads,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_BIASES = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value", "output")}
_LAYERS = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def with_dangling_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Add what the first files have beside the kinds of layers; there was no Cohere Compass in version 4."""
    older = {key: value for key, value in dtype_to_version_4(config).items() if key != "rope_parameters"}
    return {**older, "rope_parameters": {**config["rope_parameters"], "rope_theta": 1e4, "rope_type": "default"}}


VARIANTS: Mapping[str, Variant] = {
    "cohere_compass_text": Variant(
        {
            **_LAYERS,
            "attention_bias": True,
            "logit_scale": 2.5,
            "layer_norm_eps": 0.1,
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 2, 2]},
            },
        },
        {
            **_BIASES,
            "untied": embedding_as_head,
            "logit scale": settings(logit_scale=None),
            "mean": settings(norm="rms"),
            "norm_eps": settings(norm_eps=1e-6),
            "window": window(None),
            "width": window(15),
            "order of layers": swapped_kinds,
            "layers without rotation": rotating,
            "rotated halves": halves,
        },
        model_type="cohere_compass_text",
        to_version_4=with_dangling_keys,
    ),
    "cohere_compass_text-two_bases-tied": Variant(
        {
            **_LAYERS,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        {
            "grouping": rolled_kv_heads,
            "base of windows": rope_of_layers(True, theta=1e5),
            "base of the others": rope_of_layers(False, theta=50.0),
            "scaling": rope_of_layers(False, scaling=None),
        },
        model_type="cohere_compass_text",
        to_version_4=with_dangling_keys,
    ),
}
