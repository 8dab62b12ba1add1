"""Variants of GPT-NeoX: parts side by side after norms of their own, or one after the other."""

from collections.abc import Mapping
from typing import Any

from tests.models.variants.variant import SIZES, Variant, embedding_as_head, rope, settings, zeroed

_SIZES = {**SIZES, "num_key_value_heads": 4}
_BIASES = {
    f"{name} bias": zeroed(name, "bias")
    for name in ("query", "key", "value", "output", "up", "down", "attention_norm", "mlp_norm", "final_norm")
}


def to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the words of 4."""
    config = dict(config)
    section = config.pop("rope_parameters")
    old = {"rotary_pct": section["partial_rotary_factor"], "rotary_emb_base": section["rope_theta"]}
    return {**config, **old, "torch_dtype": config.pop("dtype")}


VARIANTS: Mapping[str, Variant] = {
    "gpt_neox": Variant(
        {"layer_norm_eps": 0.1, "hidden_size": 64},
        {
            **_BIASES,
            "side by side": settings(block="pre_norm"),
            "two norms": settings(block="parallel"),
            "partial rotation": rope(dim=8),
            "activation": settings(activation="relu"),
            "norm_eps": settings(norm_eps=1e-5),
            "untied": embedding_as_head,
        },
        model_type="gpt_neox",
        sizes=_SIZES,
        to_version_4=to_version_4,
    ),
    "gpt_neox-one_after_the_other": Variant(
        {
            "use_parallel_residual": False,
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        },
        {"one after the other": settings(block="parallel_norms"), "theta": rope(theta=1e4)},
        model_type="gpt_neox",
        sizes=_SIZES,
        to_version_4=to_version_4,
    ),
}
