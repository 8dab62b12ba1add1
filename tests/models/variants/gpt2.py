"""Variants of gpt2: as published, and with every other choice that its configuration offers."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.variant import Variant, embedding_as_head, settings, zeroed

SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 160,
    "bos_token_id": 96,
    "eos_token_id": 96,
    "pad_token_id": 0,
}


def variant(config: Mapping[str, Any], without: Mapping[str, Any]) -> Variant:
    return Variant(config, without, model_type="gpt2", sizes=SIZES, to_version_4=dtype_to_version_4)


VARIANTS: Mapping[str, Variant] = {
    "gpt2": variant(
        {"layer_norm_epsilon": 0.1},
        {
            "norm_eps": settings(norm_eps=1e-5),
            "positions": zeroed("positions", "embedding"),
            "gelu_new": settings(activation="relu"),
            "query bias": zeroed("query", "bias"),
            "value bias": zeroed("value", "bias"),
            "output bias": zeroed("output", "bias"),
            "up bias": zeroed("up", "bias"),
            "down bias": zeroed("down", "bias"),
        },
    ),
    "gpt2-n_inner-untied-scales": variant(
        {
            "n_layer": 3,
            "n_inner": 40,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
        {
            "untied": embedding_as_head,
            "gelu": settings(activation="relu"),
            "unscaled": settings(attention_scale=None),
            "by depth": settings(scores_by_depth=False),
        },
    ),
}
