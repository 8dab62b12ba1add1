"""Variants of EXAONE 3, InternLM3, IQuest-Coder, CWM, Jais 2 and VaultGemma."""

from collections.abc import Mapping

from tests.models.variants.relatives import without_layer_types
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_QKV = {f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "key", "value")}
_MLP = {f"{name} bias": zeroed("mlp", name, "bias") for name in ("up", "down")}
_OUTPUT = {"output bias": zeroed("attention", "output", "bias")}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_ALL = {**_QKV, **_OUTPUT, **_MLP}
_HEAD_DIM = {**SIZES, "head_dim": 12}

VARIANTS: Mapping[str, Variant] = {
    "exaone": Variant(
        {"rms_norm_eps": 0.1},
        {"norm_eps": settings(norm_eps=1e-5), "grouping": rolled_kv_heads, "rotation": rope(theta=1e4)},
        model_type="exaone",
        sizes=_HEAD_DIM,
    ),
    "internlm3": Variant(_BIASES, {**_ALL, "grouping": rolled_kv_heads}, model_type="internlm3", sizes=_HEAD_DIM),
    "iquestcoder": Variant({}, {"untied": embedding_as_head}, model_type="iquestcoder", sizes=_HEAD_DIM),
    "cwm": Variant(
        {"num_hidden_layers": 5, "sliding_window": 16},
        {"window": window(None), "width": window(15), "order of layers": swapped_kinds},
        model_type="cwm",
        sizes={**_HEAD_DIM, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        to_version_4=without_layer_types,
    ),
    "jais2": Variant(
        {"layer_norm_eps": 0.1},
        {
            **_ALL,
            "norm bias": zeroed("attention_norm", "bias"),
            "norm_eps": settings(norm_eps=1e-5),
            "activation": settings(activation="relu"),
        },
        model_type="jais2",
    ),
    "vaultgemma": Variant(
        {"num_hidden_layers": 3, "sliding_window": 16, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 3.0},
        {
            "width": window(15),
            "order of layers": swapped_kinds,
            "scale": settings(attention_scale=None),
            "scores' cap": settings(attention_softcap=None),
            "scaled embedding": settings(embedding_scale=None),
        },
        model_type="vaultgemma",
        sizes={**_HEAD_DIM, "tie_word_embeddings": True},
        to_version_4=without_layer_types,
    ),
}
