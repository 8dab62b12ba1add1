"""Variants of further mixtures of experts, and of their dense relatives."""

from collections.abc import Mapping

from tests.models.variants.experts import ALL, experts
from tests.models.variants.llama4 import kinds
from tests.models.variants.variant import (
    Variant,
    halves,
    partial_rope_to_version_4,
    rope,
    scaling,
    settings,
    window,
    zeroed,
)

_SIX = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1, 1.3, 1.7, 2.0, 2.5, 3.0],
    "long_factor": [1.5, 1.8, 2.0, 3.0, 4.0, 5.0],
    "short_mscale": 1.3,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 120,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}

VARIANTS: Mapping[str, Variant] = {
    # Texts are short: transformers rotates long ones by the short factors, unlike the model's own code.
    "phimoe": Variant(
        {
            "num_local_experts": 6,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 20,
            "rope_parameters": _LONGROPE,
        },
        {
            **{name: ALL[name] for name in ("which experts", "gate and up", "how many")},
            "softmax of those near the best": experts(spread=0.0),
            "one by one": experts(scoring="softmax"),
            "window": window(None),
            "biases of norms": zeroed("attention_norm", "bias"),
            "biases": zeroed("query", "bias"),
            "bias of logits": zeroed("head_bias", "bias"),
            "factors": scaling(short_factors=(1.0,) * 6),
            "magnitude": scaling(attention_factor=1.0),
        },
        model_type="phimoe",
    ),
    "dots1": Variant(
        {
            **_SIX,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
        {
            **ALL,
            "groups": experts(groups=1, kept_groups=1),
            "correction": experts(correction_bias=False),
            "normalised": experts(normalised=False),
            "scale": experts(scale=1.0),
            "shared expert": zeroed("shared", "down", "kernel"),
            "query norm": zeroed("query_norm", "scale"),
            "window": window(None),
        },
        model_type="dots1",
    ),
    "ernie4_5_moe": Variant(
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
        },
        {
            **ALL,
            "correction": experts(correction_bias=False),
            "normalised": experts(normalised=False),
            "softmax": experts(scoring="sigmoid"),
            "shared expert": zeroed("shared", "down", "kernel"),
            "neighbouring lanes": halves,
        },
        model_type="ernie4_5_moe",
    ),
    "minimax_m2": Variant(
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
        {
            **ALL,
            "correction": experts(correction_bias=False),
            "normalised": experts(normalised=False),
            "sigmoid": experts(scoring="softmax"),
            "norms": settings(qk_norm=None),
            "rotated part": rope(dim=16),
        },
        model_type="minimax_m2",
        to_version_4=partial_rope_to_version_4,
    ),
    "hunyuan_v1_moe": Variant(
        {
            "num_experts": 6,
            "moe_topk": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 100.0},
        },
        {
            **ALL,
            "normalised": experts(normalised=False),
            "shared expert": zeroed("shared", "down", "kernel"),
            "norms after rotation": settings(norm_after_rotation=False),
            "stretched base": rope(theta=10000.0),
        },
        model_type="hunyuan_v1_moe",
    ),
    "hunyuan_v1_dense-tied-bias": Variant(
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
        {
            "norms after rotation": settings(norm_after_rotation=False),
            "key norm": zeroed("key_norm", "scale"),
            "biases": zeroed("query", "bias"),
        },
        model_type="hunyuan_v1_dense",
    ),
    "ministral3": Variant(
        {"head_dim": 16, "rope_parameters": _YARN},
        {
            "growth of queries": kinds(sharpening=None),
            "yarn": rope(scaling=None),
            "magnitude": scaling(mscale=None),
        },
        model_type="ministral3",
    ),
}
