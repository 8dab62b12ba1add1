"""Variants of Seed-OSS, Arcee, Helium, Ernie 4.5, Ministral, OLMo 1 and EXAONE 4."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.granite import rotating
from tests.models.variants.olmo import norms_before
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    halves,
    rolled_kv_heads,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_QKV = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
_MLP = {f"{name} bias": zeroed("mlp", name, "bias") for name in ("up", "down")}
_OUTPUT = {"output bias": zeroed("attention", "output", "bias")}
_HEAD_DIM = {**SIZES, "head_dim": 12}
_LAYERS = ["full_attention", "sliding_attention", "full_attention"]


def without_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what follows from other keys."""
    return {key: value for key, value in rope_to_version_4(config).items() if key != "layer_types"}


def with_mean(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Norm without subtracting the mean."""
    ones = {"scale": np.ones(config.model_dim)}
    blocks = {layer: {**block, "attention_norm": ones, "mlp_norm": ones} for layer, block in params["blocks"].items()}
    return replace(config, norm="rms"), {**params, "blocks": blocks, "final_norm": ones}


VARIANTS: Mapping[str, Variant] = {
    "seed_oss": Variant(
        {"attention_out_bias": True, "mlp_bias": True},
        {**_QKV, **_OUTPUT, **_MLP, "grouping": rolled_kv_heads, "untied": embedding_as_head},
        model_type="seed_oss",
        sizes=_HEAD_DIM,
    ),
    "arcee": Variant(
        {"mlp_bias": True, "attention_bias": True, "rms_norm_eps": 0.1},
        {**_QKV, **_OUTPUT, **_MLP, "activation": settings(activation="relu"), "norm_eps": settings(norm_eps=1e-5)},
        model_type="arcee",
    ),
    "helium": Variant(
        {"mlp_bias": False, "attention_bias": True},
        {**_QKV, "neighbouring lanes": halves, "grouping": rolled_kv_heads},
        model_type="helium",
        sizes=_HEAD_DIM,
    ),
    "ernie4_5": Variant(
        {"use_bias": True},
        {**_QKV, **_OUTPUT, **_MLP, "neighbouring lanes": halves},
        model_type="ernie4_5",
        sizes={**_HEAD_DIM, "tie_word_embeddings": True},
    ),
    "ministral": Variant(
        {"num_hidden_layers": 3, "sliding_window": 16, "layer_types": _LAYERS},
        {"window": window(None), "width": window(15), "order of layers": swapped_kinds},
        model_type="ministral",
        sizes=_HEAD_DIM,
    ),
    "olmo": Variant(
        {"attention_bias": True},
        {**_QKV, **_OUTPUT, "mean": with_mean, "grouping": rolled_kv_heads},
        model_type="olmo",
    ),
    "exaone4": Variant(
        {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2},
        {
            "norms after each part": norms_before,
            "norms of heads": settings(qk_norm=None),
            "window": window(None),
            "order of layers": swapped_kinds,
            "layers without rotation": rotating,
        },
        model_type="exaone4",
        to_version_4=without_layer_types,
    ),
    "exaone4-no_window-tied": Variant(
        {"sliding_window": None, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
        {"norms of heads": settings(qk_norm=None)},
        model_type="exaone4",
    ),
}
