"""Variants of llama that together use every configuration feature, and what each feature's absence would be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.toys import rope_of, with_rope

Edit = Callable[[DecoderConfig, Params], tuple[DecoderConfig, Params]]


@dataclass(frozen=True)
class Variant:
    """Keys of ``config.json`` beside the common sizes, and edits that each turn one feature off.

    ``max_len`` is set where texts may outgrow ``max_position_embeddings``.
    """

    config: Mapping[str, Any]
    without: Mapping[str, Edit] = field(default_factory=dict)
    max_len: int | None = None


def rope(**changes: Any) -> Edit:
    """Change fields of the rotary positions."""
    return lambda config, params: (with_rope(config, **changes), params)


def scaling(**changes: Any) -> Edit:
    """Change fields of the rope scaling."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        stretched = rope_of(config).scaling
        assert stretched is not None
        return with_rope(config, scaling=replace(stretched, **changes)), params

    return edit


def settings(**changes: Any) -> Edit:
    """Change fields of the decoder's configuration."""
    return lambda config, params: (replace(config, **changes), params)


def zeroed(*path: str) -> Edit:
    """Set the parameters whose path ends so to zero."""

    def clear(keys: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in keys)
        return leaf * 0 if names[-len(path) :] == path else leaf

    return lambda config, params: (config, jax.tree_util.tree_map_with_path(clear, params))


def rolled_kv_heads(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give every group of query heads the next group's keys and values."""

    def roll(keys: Any, leaf: Any) -> Any:
        is_kv = {key.key for key in keys} & {"key", "value"}
        return jax.numpy.roll(leaf, config.head_dim, axis=-2) if is_kv and leaf.ndim > 1 else leaf

    return config, jax.tree_util.tree_map_with_path(roll, params)


def embedding_as_head(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Tie the output matrix to the embedding."""
    tied = {name: value for name, value in params.items() if name != "head"}
    return replace(config, tied_embeddings=True), tied


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
