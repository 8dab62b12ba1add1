"""Variants of Nemotron: LayerNorm stored minus one, a squared ReLU, and rotation of half of each head."""

from collections.abc import Mapping

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

_NAMES = ("query", "key", "value", "output", "up", "down")

VARIANTS: Mapping[str, Variant] = {
    "nemotron": Variant(
        {"attention_bias": True, "mlp_bias": True, "norm_eps": 0.1},
        {
            **{f"{name} bias": zeroed(name, "bias") for name in _NAMES},
            "norms' ones": settings(norm="layer"),
            "norm bias": zeroed("attention_norm", "bias"),
            "final norm bias": zeroed("final_norm", "bias"),
            "activation": settings(activation="relu"),
            "norm_eps": settings(norm_eps=1e-5),
            "partial rotation": rope(dim=16),
            "grouping": rolled_kv_heads,
            "untied": embedding_as_head,
        },
        model_type="nemotron",
        sizes={**SIZES, "head_dim": 16},
        to_version_4=partial_rope_to_version_4,
    ),
}
