"""Variants of AFMoE, BitNet, nanochat, Persimmon and DBRX: what is gated, normed, turned and bounded inside a part."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part
from jaxinfer.notation import Params
from tests.models.variants.experts import ALL, experts
from tests.models.variants.granite import rotating
from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.relatives import without_layer_types
from tests.models.variants.variant import (
    Variant,
    embedding_as_head,
    partial_rope_to_version_4,
    rolled_kv_heads,
    rope,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_QKV = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
_MLP = {f"{name} bias": zeroed("mlp", name, "bias") for name in ("up", "down")}
DBRX_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 160,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}


def turned_forwards(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Put the halves of queries and keys back in a checkpoint's order."""

    def reorder(keys: Any, leaf: Any) -> Any:
        part = Part("", rotary=(config.head_dim, config.head_dim), backwards=True)
        return leaf[part.rows(len(leaf))] if {key.key for key in keys} & {"query", "key"} else leaf

    return config, jax.tree_util.tree_map_with_path(reorder, params)


def even_norms(*path: str) -> Any:
    """Let the norms whose path ends so weigh all numbers alike."""

    def clear(keys: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in keys)
        return np.ones_like(leaf) if names[-len(path) :] == path else leaf

    return lambda config, params: (config, jax.tree_util.tree_map_with_path(clear, params))


def dbrx_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the words of 4."""
    return {key: value for key, value in dtype_to_version_4(config).items() if key != "rope_parameters"}


VARIANTS: Mapping[str, Variant] = {
    "afmoe": Variant(
        {
            "num_hidden_layers": 3,
            "global_attn_every_n_layers": 2,
            "sliding_window": 16,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
        {
            **ALL,
            "gate": zeroed("attention", "gate", "kernel"),
            "no gate": settings(attention_gate=False),
            "correction": experts(correction_bias=False),
            "normalised": experts(normalised=False),
            "scale": experts(scale=1.0),
            "shared experts": zeroed("shared", "down", "kernel"),
            "window": window(None),
            "order of layers": swapped_kinds,
            "layers without rotation": rotating,
            "scaled embedding": settings(embedding_scale=None),
            "norms of heads": settings(qk_norm=None),
            "norm after attention": even_norms("attention_post_norm", "scale"),
        },
        model_type="afmoe",
        to_version_4=without_layer_types,
    ),
    "bitnet": Variant(
        {"rms_norm_eps": 0.1},
        {
            "norms inside": settings(inner_norms=False),
            "norm of what attention mixes": even_norms("attention", "inner_norm", "scale"),
            "norm of features": even_norms("mlp", "inner_norm", "scale"),
            "squared": settings(activation="relu"),
            "grouping": rolled_kv_heads,
        },
        model_type="bitnet",
    ),
    "nanochat": Variant(
        {"final_logit_softcapping": 3.0},
        {
            "backwards": turned_forwards,
            "norms of heads": settings(qk_norm=None),
            "norm of the embedding": settings(embedding_norm=False),
            "cap": settings(final_softcap=None),
            "squared": settings(activation="relu"),
            "untied": embedding_as_head,
        },
        model_type="nanochat",
    ),
    "persimmon": Variant(
        {"num_key_value_heads": 4, "hidden_size": 64},
        {
            **_QKV,
            **_MLP,
            "norms of heads": settings(qk_norm=None),
            "their biases": zeroed("query_norm", "bias"),
            "partial rotation": rope(dim=16),
            "activation": settings(activation="relu"),
            "norm bias": zeroed("attention_norm", "bias"),
        },
        model_type="persimmon",
        to_version_4=partial_rope_to_version_4,
    ),
    "dbrx": Variant(
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 500.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 3},
        },
        {
            **ALL,
            "bounds": settings(clip_qkv=None),
            "normalised": experts(normalised=False),
            "grouping": rolled_kv_heads,
            "base": rope(theta=10000.0),
        },
        model_type="dbrx",
        sizes=DBRX_SIZES,
        to_version_4=dbrx_to_version_4,
    ),
    "olmo-clipped": Variant(
        {"clip_qkv": 0.7}, {"bounds": settings(clip_qkv=None), "bound": settings(clip_qkv=0.8)}, model_type="olmo"
    ),
    "olmoe-clipped": Variant(
        {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.7, "num_key_value_heads": 4},
        {"bounds": settings(clip_qkv=None)},
        model_type="olmoe",
    ),
}
