"""Variants of Granite 3, of Granite 4 without experts, and of SmolLM3: factors everywhere, layers without rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.notation import Params
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_FACTORS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.25,
}
_WITHOUT_FACTORS = {
    "embedding factor": settings(embedding_scale=None),
    "attention factor": settings(attention_scale=None),
    "residual factor": settings(residual_scale=None),
    "logits factor": settings(logit_scale=None),
}
_BIASES = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value", "output")}
# One Mamba layer's sizes must fit even where there is none.
_HYBRID = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 56,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 4,
}


def rotating(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Rotate in every layer."""
    (rope,) = {kind.rope for kind in config.kinds if kind.rope is not None}
    return replace(config, layer_pattern=tuple(replace(kind, rope=rope) for kind in config.layer_pattern)), params


def unrotated(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Rotate in no layer."""
    return replace(config, layer_pattern=(LayerKind(rope=None),)), params


def hybrid_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the words of 4."""
    return {**rope_to_version_4(config), "layer_types": ["attention"] * len(config["layer_types"])}


def smollm3_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what follows from other keys."""
    return {key: value for key, value in rope_to_version_4(config).items() if key != "layer_types"}


VARIANTS: Mapping[str, Variant] = {
    "granite": Variant(
        {**_FACTORS, "tie_word_embeddings": True},
        {**_WITHOUT_FACTORS, "grouping": rolled_kv_heads},
        model_type="granite",
    ),
    "granite-biases": Variant(
        {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3},
        {
            **_BIASES,
            "gate bias": zeroed("gate", "bias"),
            "down bias": zeroed("down", "bias"),
            "untied": embedding_as_head,
        },
        model_type="granite",
    ),
    "granite4": Variant(
        {**_HYBRID, **_FACTORS, "position_embedding_type": "rope"},
        {**_WITHOUT_FACTORS, "rotation": unrotated},
        model_type="granitemoehybrid",
        to_version_4=hybrid_to_version_4,
    ),
    "granite4-nope-bias": Variant(
        {**_HYBRID, "attention_bias": True, "attention_multiplier": 0.3},
        # Without rotation, a key's bias adds the same to all scores of a query, which changes no weight.
        {name: edit for name, edit in _BIASES.items() if name != "key bias"},
        model_type="granitemoehybrid",
        to_version_4=hybrid_to_version_4,
    ),
    "smollm3": Variant(
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
        {"layers without rotation": rotating, "which layers": swapped_kinds, "grouping": rolled_kv_heads},
        model_type="smollm3",
        sizes={**SIZES, "tie_word_embeddings": True},
        to_version_4=smollm3_to_version_4,
    ),
    "smollm3-window-biases": Variant(
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {**_BIASES, "window": window(None), "width": window(15), "up bias": zeroed("up", "bias")},
        model_type="smollm3",
        to_version_4=smollm3_to_version_4,
    ),
}
