"""Variants of Qwen2 and Qwen3: biases, norms of queries and keys, windows on some layers, and yarn."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.variant import (
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    rope_to_version_4,
    scaling,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

WINDOW = {"window": window(None), "one more": window(17), "one less": window(15)}
QKV_BIAS = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


def to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite as the first files have it: no list of layers, a width even of no window, the old word for the kind."""
    config = {key: value for key, value in rope_to_version_4(config).items() if key != "layer_types"}
    if not config["use_sliding_window"]:
        config["sliding_window"] = 16
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    return config


VARIANTS: Mapping[str, Variant] = {
    "qwen2-mixed-tied": Variant(
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {**WINDOW, **QKV_BIAS, "which layers": swapped_kinds},
        model_type="qwen2",
        to_version_4=to_version_4,
    ),
    "qwen2-yarn": Variant(
        {"max_position_embeddings": 64, "rope_parameters": YARN},
        {
            "yarn": rope(scaling=None),
            "factor": scaling(factor=2.0),
            "original length": scaling(original_max_position=160),
            "untied": embedding_as_head,
        },
        max_len=160,
        model_type="qwen2",
        to_version_4=to_version_4,
    ),
    "qwen3-head_dim-tied": Variant(
        {
            "head_dim": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "norms of queries and keys": settings(qk_norm=None),
            "query norm": zeroed("query_norm", "scale"),
            "key norm": zeroed("key_norm", "scale"),
            "theta": rope(theta=1e4),
            "grouping": rolled_kv_heads,
        },
        model_type="qwen3",
        to_version_4=to_version_4,
    ),
    # A list of layers that max_window_layers cannot say, as the last releases of transformers 4 write it too.
    "qwen3-bias-layer_types": Variant(
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            **WINDOW,
            **QKV_BIAS,
            "output bias": zeroed("attention", "output", "bias"),
            "which layers": swapped_kinds,
        },
        model_type="qwen3",
    ),
}
