"""Variants whose scores fall with the distance: BLOOM, MPT and Falcon-RW."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.falcon import falcon
from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.variant import (
    SIZES,
    Edit,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    settings,
    zeroed,
)

_BIASES = {f"{name} bias": zeroed(name, "bias") for name in ("query", "value", "output", "up", "down")}
_LEFT_OUT = ("num_key_value_heads", "intermediate_size", "max_position_embeddings")
_SIZES = {key: value for key, value in SIZES.items() if key not in _LEFT_OUT} | {"hidden_size": 64}


def slopes(change: float) -> Edit:
    """Multiply all slopes."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        assert config.alibi is not None
        changed = replace(config.alibi, slopes=tuple(change * slope for slope in config.alibi.slopes))
        return replace(config, alibi=changed), params

    return edit


def reversed_slopes(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give every head another one's slope."""
    assert config.alibi is not None
    return replace(config, alibi=replace(config.alibi, slopes=config.alibi.slopes[::-1])), params


def unrounded(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Add the bias to scores as it is, when they have been scaled."""
    assert config.alibi is not None
    return replace(config, alibi=replace(config.alibi, rounded=False)), params


_DISTANCE: dict[str, Edit] = {"distance": slopes(0.0), "slopes": slopes(1.1), "whose slopes": reversed_slopes}


def _variant(model_type: str, config: Mapping[str, Any], without: Mapping[str, Edit]) -> Variant:
    return Variant(
        config, {**_DISTANCE, **without}, model_type=model_type, sizes=_SIZES, to_version_4=dtype_to_version_4
    )


VARIANTS: Mapping[str, Variant] = {
    "bloom": _variant(
        "bloom",
        {"tie_word_embeddings": True, "seq_length": 160},
        {
            **_BIASES,
            "norm of the embedding": settings(embedding_norm=False),
            "its bias": zeroed("embed_norm", "bias"),
            "activation": settings(activation="relu"),
            "head order": rolled_kv_heads,
        },
    ),
    # Six heads, which are no power of two.
    "bloom-untied-six_heads": _variant(
        "bloom",
        {"num_attention_heads": 6, "hidden_size": 96, "layer_norm_epsilon": 0.1, "seq_length": 160},
        {"norm_eps": settings(norm_eps=1e-5), "untied": embedding_as_head},
    ),
    "mpt": _variant(
        "mpt",
        {"max_seq_len": 160, "tie_word_embeddings": True, "layer_norm_epsilon": 0.1},
        {"activation": settings(activation="relu"), "norm_eps": settings(norm_eps=1e-5)},
    ),
    "mpt-six_heads-scale": _variant(
        "mpt",
        {
            "n_heads": 6, "d_model": 96, "max_seq_len": 160, "tie_word_embeddings": False,
            "attn_config": {"softmax_scale": 0.4},
        },
        {"scale": settings(attention_scale=None), "untied": embedding_as_head},
    ),
    "falcon-rw": falcon(
        {
            "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 6,
            "hidden_size": 96,
        },
        {**_DISTANCE, **_BIASES, "rounding": unrounded, "head order": rolled_kv_heads},
    ),
}  # fmt: skip
