"""Variants of the families with latent attention: what is compressed, rotated, scaled, and who is chosen."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part
from jaxinfer.notation import Params
from tests.models.variants.experts import ALL, experts
from tests.models.variants.variant import (
    SIZES,
    Edit,
    Variant,
    scaling,
    settings,
    zeroed,
)

LATENT: Mapping[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}


def rolled(name: str) -> Edit:
    """Give every head the matrix of the next."""

    def roll(keys: Any, leaf: Any) -> Any:
        return np.roll(leaf, 1, axis=0) if name in {key.key for key in keys} else leaf

    return lambda config, params: (config, jax.tree_util.tree_map_with_path(roll, params))


def halves(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Let rotary positions turn halves where a checkpoint's turn neighbouring lanes."""

    def reorder(keys: Any, leaf: Any) -> Any:
        if not {key.key for key in keys} & {"query", "key"}:
            return leaf
        return leaf[np.argsort(Part("", rotary=(8, 8)).rows(len(leaf)))]

    return config, jax.tree_util.tree_map_with_path(reorder, params)


_ATTENTION = {
    "neighbouring lanes": halves,
    "whose keys": rolled("key_heads"),
    "whose values": rolled("value_heads"),
    "latent norm": zeroed("latent_norm", "scale"),
    "shared key": zeroed("attention", "key", "kernel"),
    "content": zeroed("content", "kernel"),
}

VARIANTS: Mapping[str, Variant] = {
    "deepseek_v2-groups-yarn": Variant(
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 0.1,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 2.0},
        },
        {
            **ALL,
            **_ATTENTION,
            "magnitude of scores": settings(attention_scale=20**-0.5),
            "magnitude of rotations": scaling(mscale=2.0),
            "groups": experts(groups=1, kept_groups=1),
            "scale": experts(scale=1.0),
            "shared experts": zeroed("shared", "down", "kernel"),
            "norm_eps": settings(norm_eps=1e-6),
        },
        model_type="deepseek_v2",
        sizes=LATENT,
    ),
    "deepseek_v2-greedy": Variant(
        {"n_group": 4, "topk_group": 1, "num_hidden_layers": 2, "attention_bias": True},
        {"all groups": experts(groups=4, kept_groups=1), "query norm": zeroed("query_norm", "scale")},
        model_type="deepseek_v2",
        sizes=LATENT,
    ),
    "deepseek_v3-bias": Variant(
        {
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rms_norm_eps": 0.1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **ALL,
            **_ATTENTION,
            "query norm": zeroed("query_norm", "scale"),
            "query bias": zeroed("query_latent", "bias"),
            "latent bias": zeroed("latent", "bias"),
            "key bias": zeroed("key", "bias"),
            "output bias": zeroed("output", "bias"),
            "magnitude of scores": settings(attention_scale=20**-0.5),
            "groups": experts(groups=1, kept_groups=1),
            "sum of two": experts(group_score="best"),
            "correction": experts(correction_bias=False),
            "sigmoid": experts(scoring="softmax"),
            "normalised": experts(normalised=False),
            "scale": experts(scale=1.0),
        },
        model_type="deepseek_v3",
        sizes=LATENT,
    ),
    "glm4_moe_lite": Variant(
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 0.1},
        {**ALL, **_ATTENTION, "shared expert": zeroed("shared", "down", "kernel")},
        model_type="glm4_moe_lite",
        sizes={key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    ),
}
