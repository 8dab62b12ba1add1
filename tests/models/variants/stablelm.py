"""Variants of StableLM and StarCoder2: LayerNorm with biases, norms of heads of their own, parts side by side."""

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    partial_rope_to_version_4,
    rolled_kv_heads,
    rope,
    settings,
    window,
    zeroed,
)

_QKV = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
_NORM_BIASES = {f"{name} bias": zeroed(name, "bias") for name in ("attention_norm", "mlp_norm", "final_norm")}


def one_after_the_other(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Run attention and the feed-forward layer in turn, each after the same norm."""
    blocks = {layer: {**block, "mlp_norm": block["attention_norm"]} for layer, block in params["blocks"].items()}
    return replace(config, block="pre_norm"), {**params, "blocks": blocks}


VARIANTS: Mapping[str, Variant] = {
    "stablelm": Variant(
        {"use_qkv_bias": True, "layer_norm_eps": 0.1, "hidden_size": 64},
        {
            **_QKV,
            **_NORM_BIASES,
            "partial rotation": rope(dim=8),
            "norm_eps": settings(norm_eps=1e-6),
            "grouping": rolled_kv_heads,
            "untied": embedding_as_head,
        },
        model_type="stablelm",
        to_version_4=partial_rope_to_version_4,
    ),
    "stablelm-parallel-qk_norm": Variant(
        {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 64, "tie_word_embeddings": True},
        {
            "side by side": one_after_the_other,
            "norms of heads": settings(qk_norm=None),
            "query norm": zeroed("query_norm", "scale"),
            "key norm": zeroed("key_norm", "scale"),
        },
        model_type="stablelm",
        to_version_4=partial_rope_to_version_4,
    ),
    "starcoder2": Variant(
        {"sliding_window": 16, "norm_epsilon": 0.1},
        {
            **_QKV,
            **_NORM_BIASES,
            "output bias": zeroed("attention", "output", "bias"),
            "up bias": zeroed("up", "bias"),
            "down bias": zeroed("down", "bias"),
            "window": window(None),
            "width": window(15),
            "activation": settings(activation="relu"),
            "norm_eps": settings(norm_eps=1e-6),
            "grouping": rolled_kv_heads,
        },
        model_type="starcoder2",
        sizes={**SIZES, "tie_word_embeddings": True},
    ),
    "starcoder2-no_bias-untied": Variant(
        {"use_bias": False, "sliding_window": None},
        {"untied": embedding_as_head},
        model_type="starcoder2",
    ),
}
