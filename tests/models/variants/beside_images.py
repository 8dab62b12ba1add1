"""Variants of text decoders beside a vision model: a prefix before their names, and M-RoPE, which texts do not need."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    rope_to_version_4,
    settings,
    zeroed,
)

_TEXT = {key: value for key, value in SIZES.items() if key != "pad_token_id"}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 32,
}
_PIXTRAL = {**_CLIP, "model_type": "pixtral", "head_dim": 16}
_QWEN = {"depth": 1, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 48}
_MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}


def inner_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the text decoder's part in the keys of transformers 4."""
    text = config["text_config"]
    return {**config, "text_config": rope_to_version_4({"dtype": config["dtype"], **text})}


def beside(model_type: str, text: Mapping[str, Any], vision: Mapping[str, Any], **outer: Any) -> Variant:
    """Return a variant whose text decoder has these keys."""
    return Variant(
        {"text_config": {**_TEXT, **text}, "vision_config": vision, **outer},
        {
            "grouping": rolled_kv_heads,
            "rotation": rope(theta=1e7),
            **({"norms of heads": settings(qk_norm=None)} if model_type.startswith("qwen3_vl") else {}),
            **({"query bias": zeroed("query", "bias")} if model_type in ("qwen2_5_vl", "qwen2_vl") else {}),
            **({} if outer.get("tie_word_embeddings") else {"untied": embedding_as_head}),
        },
        model_type=model_type,
        sizes={},
        to_version_4=inner_to_version_4,
    )


_MISTRAL = {"model_type": "mistral", "head_dim": 12, "sliding_window": None}
VARIANTS: Mapping[str, Variant] = {
    "mistral3": beside("mistral3", _MISTRAL, _PIXTRAL, tie_word_embeddings=False),
    "llava": beside("llava", {"model_type": "llama"}, _CLIP, image_token_index=95),
    "internvl-qwen3": beside(
        "internvl",
        {"model_type": "qwen3", "head_dim": 12},
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
        tie_word_embeddings=True,
    ),
    "qwen2_5_vl": beside("qwen2_5_vl", {"rope_parameters": _MROPE}, _QWEN),
    "qwen2_vl": beside("qwen2_vl", {"rope_parameters": _MROPE}, {"depth": 1, "embed_dim": 32, "num_heads": 2}),
    "qwen3_vl": beside(
        "qwen3_vl", {"head_dim": 12, "rope_parameters": _MROPE}, {**_QWEN, "deepstack_visual_indexes": [0]}
    ),
    "qwen3_vl_moe": beside(
        "qwen3_vl_moe",
        {
            "head_dim": 12,
            "rope_parameters": _MROPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
}
