"""Variants of llama that together use every configuration feature, and what each feature's absence would be."""

from collections.abc import Mapping

from tests.models.variants.variant import (
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    scaling,
    settings,
    zeroed,
)

NO_SCALING = rope(scaling=None)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}

VARIANTS: Mapping[str, Variant] = {
    "mha": Variant(
        {"num_key_value_heads": 4, "rms_norm_eps": 0.1},
        {"norm_eps": settings(norm_eps=1e-6), "untied": embedding_as_head, "head order": rolled_kv_heads},
    ),
    "gqa-tied-attention_bias-linear": Variant(
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
        {
            "linear": NO_SCALING,
            "grouping": rolled_kv_heads,
            "query bias": zeroed("attention", "query", "bias"),
            "key bias": zeroed("attention", "key", "bias"),
            "value bias": zeroed("attention", "value", "bias"),
            "output bias": zeroed("attention", "output", "bias"),
        },
    ),
    "mqa-mlp_bias-llama3-theta": Variant(
        {
            "num_key_value_heads": 1,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
        {
            "llama3": NO_SCALING,
            "factor": scaling(factor=1.0),
            "low": scaling(low_freq_factor=0.5),
            "high": scaling(high_freq_factor=12.0),
            "original length": scaling(original_max_position=160),
            "theta": rope(theta=1e4),
            "gate bias": zeroed("gate", "bias"),
            "up bias": zeroed("up", "bias"),
            "down bias": zeroed("down", "bias"),
        },
    ),
    "gqa-head_dim-yarn": Variant(
        {"head_dim": 20, "rope_parameters": {**YARN, "beta_fast": 3.0, "beta_slow": 0.5}},
        {
            "yarn": NO_SCALING,
            "attention factor": scaling(attention_factor=1.0),
            "beta_fast": scaling(beta_fast=32.0),
            "beta_slow": scaling(beta_slow=1.0),
            "original length": scaling(original_max_position=160),
        },
    ),
    "yarn-attention_factor-truncate": Variant(
        {"rope_parameters": {**YARN, "attention_factor": 0.7, "truncate": False}},
        {"attention_factor": scaling(attention_factor=None), "truncate": scaling(truncate=True)},
    ),
    "yarn-mscale": Variant(
        {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
        {"mscale": scaling(mscale=None), "mscale_all_dim": scaling(mscale_all_dim=2.0)},
    ),
    "gqa-dynamic": Variant(
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
        {"dynamic": NO_SCALING, "factor": scaling(factor=8.0)},
        max_len=160,
    ),
    "head_dim-theta": Variant(
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"theta": rope(theta=1e4)},
    ),
}
