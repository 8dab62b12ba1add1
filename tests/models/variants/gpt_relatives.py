"""Variants of StarCoder 1, GPT-J, CodeGen and GPT-Neo."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.gpt2 import SIZES
from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.variant import (
    Edit,
    Variant,
    embedding_as_head,
    halves,
    rolled_kv_heads,
    rope,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_MLP = {f"{name} bias": zeroed("mlp", name, "bias") for name in ("up", "down")}
_ROTATING = {**SIZES, "n_embd": 64, "rotary_dim": 8}
_NEO_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": 96,
    "eos_token_id": 96,
    "pad_token_id": 0,
}
_TURNED = {
    **_MLP,
    "neighbouring lanes": halves,
    "partial rotation": rope(dim=16),
    "head bias": zeroed("head_bias", "bias"),
    "head order": rolled_kv_heads,
}


def relative(model_type: str, config: Mapping[str, Any], without: Mapping[str, Edit], sizes: Any = SIZES) -> Variant:
    """Return a variant of a relative of GPT-2."""
    return Variant(config, without, model_type=model_type, sizes=sizes, to_version_4=dtype_to_version_4)


VARIANTS: Mapping[str, Variant] = {
    "gpt_bigcode": relative(
        "gpt_bigcode",
        {"layer_norm_epsilon": 0.1},
        {
            **_MLP,
            # Those of keys change all scores of a query alike, where nothing rotates.
            **{f"{name} bias": zeroed("attention", name, "bias") for name in ("query", "value", "output")},
            "positions": zeroed("positions", "embedding"),
            "activation": settings(activation="relu"),
            "norm_eps": settings(norm_eps=1e-5),
        },
    ),
    "gpt_bigcode-heads-untied-unscaled": relative(
        "gpt_bigcode",
        {"multi_query": False, "tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": 40},
        {"head order": rolled_kv_heads, "untied": embedding_as_head, "unscaled": settings(attention_scale=None)},
    ),
    "gptj": relative("gptj", {}, {**_TURNED, "untied": embedding_as_head}, _ROTATING),
    "codegen": relative("codegen", {"n_head": 8, "n_embd": 128}, {**_TURNED, "untied": embedding_as_head}, _ROTATING),
    "gpt_neo": relative(
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 16},
        {
            **_MLP,
            "output bias": zeroed("attention", "output", "bias"),
            "positions": zeroed("positions", "embedding"),
            "window": window(None),
            "width": window(15),
            "order of layers": swapped_kinds,
            "unscaled": settings(attention_scale=None),
        },
        _NEO_SIZES,
    ),
}
