"""Variants of Falcon: one head of keys, groups of heads after two norms, and parts one after the other."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.variant import (
    SIZES,
    Edit,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    rope_to_version_4,
    settings,
    zeroed,
)

_SIZES = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "intermediate_size")}
_BIASES = {f"{name} bias": zeroed(name, "bias") for name in ("query", "key", "value", "output", "up", "down")}


def falcon(config: Mapping[str, Any], without: Mapping[str, Edit]) -> Variant:
    """Return a variant of Falcon."""
    return Variant(config, without, model_type="falcon", sizes=_SIZES, to_version_4=rope_to_version_4)


VARIANTS: Mapping[str, Variant] = {
    "falcon-groups-two_norms": falcon(
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 64},
        {
            **_BIASES,
            "two norms": settings(block="parallel"),
            "mlp norm": zeroed("mlp_norm", "scale"),
            "norm bias": zeroed("attention_norm", "bias"),
            "grouping": rolled_kv_heads,
            "activation": settings(activation="relu"),
            "untied": embedding_as_head,
        },
    ),
    "falcon-one_head-tied": falcon(
        {"tie_word_embeddings": True, "layer_norm_epsilon": 0.1},
        {"norm_eps": settings(norm_eps=1e-5), "rotation": rope(theta=1e6)},
    ),
    "falcon-groups-one_norm": falcon(
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"grouping": rolled_kv_heads},
    ),
    "falcon-one_after_the_other": falcon(
        {"parallel_attn": False, "multi_query": False, "bias": True},
        {**_BIASES, "one after the other": settings(block="parallel_norms"), "head order": rolled_kv_heads},
    ),
}
