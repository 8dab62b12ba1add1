"""Variants of Apertus: xIELU with parameters of each layer, and norms of heads."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.llama import LLAMA3
from tests.models.variants.variant import Variant, rolled_kv_heads, rope, settings, zeroed

_ROPE: Mapping[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}

VARIANTS: Mapping[str, Variant] = {
    "apertus": Variant(
        {"attention_bias": True, "rope_parameters": _ROPE},
        {
            **{f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value", "output")},
            **{name: zeroed("activation", name) for name in ("curvature", "saturation", "slope")},
            "activation": settings(activation="relu_squared"),
            "norms of heads": settings(qk_norm=None),
            "grouping": rolled_kv_heads,
            "llama3": rope(scaling=None),
        },
        model_type="apertus",
    ),
}
