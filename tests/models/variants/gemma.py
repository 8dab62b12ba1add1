"""Variants of Gemma 1, 2 and 3 that together use every configuration feature."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.notation import Params
from tests.models.variants.variant import (
    SIZES,
    Edit,
    Variant,
    embedding_as_head,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_TIED = {**SIZES, "head_dim": 16, "tie_word_embeddings": True}


def rope_of_layers(windowed: bool, **changes: Any) -> Edit:
    """Change fields of the rotary positions of the layers with a window, or of those without."""

    def change(kind: LayerKind) -> LayerKind:
        if (kind.window is not None) != windowed:
            return kind
        assert kind.rope is not None
        return replace(kind, rope=replace(kind.rope, **changes))

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        return replace(config, layer_pattern=tuple(change(kind) for kind in config.layer_pattern)), params

    return edit


def gemma3_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the keys of 4.50: both bases and the period stand outside."""
    config = dict(config)
    ropes, types = config.pop("rope_parameters"), config.pop("layer_types")
    local = ropes["sliding_attention"]
    del config["_sliding_window_pattern"]
    config["sliding_window_pattern"] = types.index("full_attention") + 1
    config["rope_local_base_freq"] = local["rope_theta"]
    return rope_to_version_4({**config, "rope_parameters": ropes["full_attention"]})


def multimodal_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the text network's part."""
    text = gemma3_to_version_4({**config["text_config"], "dtype": config["dtype"]})
    older = {key: value for key, value in config.items() if key != "dtype"}
    return {**older, "text_config": text, "torch_dtype": config["dtype"]}


_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_GEMMA3 = {
    "query_pre_attn_scalar": 5,
    "sliding_window": 16,
    "rope_parameters": _ROPES,
    "rms_norm_eps": 1e-3,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

VARIANTS: Mapping[str, Variant] = {
    "gemma-mqa": Variant(
        {"num_key_value_heads": 1, "rms_norm_eps": 0.5},
        {
            "embedding scale": settings(embedding_scale=None),
            "norms plus one": settings(norm="rms"),
            "activation": settings(activation="silu"),
            "norm_eps": settings(norm_eps=1e-6),
        },
        model_type="gemma",
        sizes=_TIED,
    ),
    "gemma2": Variant(
        {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 5,
            "sliding_window": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
        },
        {
            "embedding scale": settings(embedding_scale=None),
            "window": window(None),
            "width": window(15),
            "order of layers": swapped_kinds,
            "query_pre_attn_scalar": settings(attention_scale=None),
            "post norms": settings(block="pre_norm"),
            "attention soft-cap": settings(attention_softcap=None),
            "final soft-cap": settings(final_softcap=None),
        },
        model_type="gemma2",
        sizes=_TIED,
    ),
    "gemma2-untied-bias-no_caps-layer_types": Variant(
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
        {
            "attention soft-cap": settings(attention_softcap=3.0),
            "untied": embedding_as_head,
            "key bias": zeroed("attention", "key", "bias"),
            "output bias": zeroed("attention", "output", "bias"),
        },
        model_type="gemma2",
        sizes=_TIED,
    ),
    "gemma3_text": Variant(
        {**_GEMMA3, "num_hidden_layers": 7, "sliding_window_pattern": 3, "final_logit_softcapping": 6.0},
        {
            "width": window(15),
            "order of layers": swapped_kinds,
            "query_pre_attn_scalar": settings(attention_scale=None),
            "base of windows": rope_of_layers(True, theta=1e5),
            "base of the rest": rope_of_layers(False, theta=50.0),
            "linear": rope_of_layers(False, scaling=None),
            "norms of queries and keys": settings(qk_norm=None),
            "final soft-cap": settings(final_softcap=None),
        },
        model_type="gemma3_text",
        sizes=_TIED,
        to_version_4=gemma3_to_version_4,
    ),
    "gemma3-vision": Variant(
        {
            "text_config": {
                **_TIED,
                **_GEMMA3,
                "sliding_window_pattern": 2,
            },
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
        },
        {"order of layers": swapped_kinds},
        model_type="gemma3",
        sizes={},
        to_version_4=multimodal_to_version_4,
    ),
}
