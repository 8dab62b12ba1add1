"""Variants of the families with experts: which are chosen, by what they are multiplied, and what stands beside them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.variant import (
    Edit,
    Variant,
    partial_rope_to_version_4,
    rope,
    scaling,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_FOUR = {"num_experts_per_tok": 2, "num_local_experts": 4}


def experts(**changes: Any) -> Edit:
    """Change fields of the experts."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        assert config.experts is not None
        return replace(config, experts=replace(config.experts, **changes)), params

    return edit


def others(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give every expert the kernels of the next."""

    def roll(keys: Any, leaf: Any) -> Any:
        return np.roll(leaf, 1, axis=0) if "experts" in {key.key for key in keys} else leaf

    return config, jax.tree_util.tree_map_with_path(roll, params)


def exchanged(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give every expert's gate the kernel of its up, and the other way round."""

    def exchange(node: Params) -> Params:
        if "experts" in node:
            gate, up = (node["experts"][name] for name in ("gate", "up"))
            return {**node, "experts": {**node["experts"], "gate": up, "up": gate}}
        return {name: exchange(value) if isinstance(value, dict) else value for name, value in node.items()}

    return config, exchange(params)


ALL = {"which experts": others, "gate and up": exchanged, "how many": experts(per_token=1)}

VARIANTS: Mapping[str, Variant] = {
    "mixtral-window": Variant(
        {**_FOUR, "sliding_window": 16, "head_dim": 20},
        {**ALL, "normalised": experts(normalised=False), "window": window(None), "theta": rope(theta=1e4)},
        model_type="mixtral",
    ),
    # The second of three layers is dense, by the list; of the others every one has experts.
    "qwen2_moe-shared-one_dense": Variant(
        {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
        {
            **ALL,
            "not normalised": experts(normalised=True),
            "shared expert": zeroed("shared", "down", "kernel"),
            "its gate": experts(shared_gate=False),
            "biases": zeroed("query", "bias"),
        },
        model_type="qwen2_moe",
    ),
    "qwen3_moe-every_second": Variant(
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
        {**ALL, "normalised": experts(normalised=False), "query norm": zeroed("query_norm", "scale")},
        model_type="qwen3_moe",
    ),
    "olmoe": Variant(
        {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
        {**ALL, "not normalised": experts(normalised=True), "norms": settings(qk_norm=None)},
        model_type="olmoe",
    ),
    "granitemoe": Variant(
        {**_FOUR, "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 0.4},
        {**ALL, "scores of the chosen": experts(scoring="softmax"), "residuals": settings(residual_scale=None)},
        model_type="granitemoe",
    ),
    # Limits that the products go beyond; the first layer of each two has the window.
    "gpt_oss": Variant(
        {
            **_FOUR,
            "head_dim": 16,
            "sliding_window": 16,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 40,
            },
        },
        {
            **ALL,
            "sinks": settings(attention_sinks=False),
            "scores of the chosen": experts(scoring="softmax"),
            "limit": experts(limit=7.0),
            "one beside up": experts(limit=None),
            "activation": settings(activation="silu"),
            "router's bias": zeroed("router", "bias"),
            "bias of gate": zeroed("expert_biases", "gate"),
            "bias of up": zeroed("expert_biases", "up"),
            "bias of down": zeroed("expert_biases", "down"),
            "biases of attention": zeroed("query", "bias"),
            "bias of its output": zeroed("output", "bias"),
            "window": window(None),
            "kinds": swapped_kinds,
            "lanes between whole numbers": scaling(truncate=True),
            "yarn": rope(scaling=None),
        },
        model_type="gpt_oss",
    ),
    "granitemoeshared-bias": Variant(
        {**_FOUR, "attention_bias": True, "shared_intermediate_size": 40},
        {**ALL, "shared expert": zeroed("shared", "down", "kernel"), "bias": zeroed("query", "bias")},
        model_type="granitemoeshared",
    ),
    # The first layer is dense.
    "glm4_moe-groups": Variant(
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.8,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
        },
        {
            **ALL,
            "groups": experts(groups=1, kept_groups=1),
            "sum of two": experts(group_score="best"),
            "correction": experts(correction_bias=False),
            "sigmoid": experts(scoring="softmax"),
            "normalised": experts(normalised=False),
            "scale": experts(scale=1.0),
            "shared expert": zeroed("shared", "down", "kernel"),
            "rotated part": rope(dim=16),
        },
        model_type="glm4_moe",
        to_version_4=partial_rope_to_version_4,
    ),
}
