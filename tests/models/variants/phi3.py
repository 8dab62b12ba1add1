"""Variants of phi3: windows, rotation of part of a head, and the rope of long texts on both sides of its length."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.variant import (
    Edit,
    Variant,
    embedding_as_head,
    partial_rope_to_version_4,
    rolled_kv_heads,
    rope,
    scaling,
    settings,
    window,
)

SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.5, 3.0, 7.0, 12.0, 20.0, 33.0]


def phi3(config: Mapping[str, Any], without: Mapping[str, Edit]) -> Variant:
    """Return a variant of phi3."""
    return Variant(config, without, model_type="phi3", to_version_4=partial_rope_to_version_4)


def whole_heads(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Rotate all 16 lanes of a head."""
    more = {"short_factors": (*SHORT, 3.0, 3.0), "long_factors": (*LONG, 40.0, 50.0)}
    return rope(dim=16)(*scaling(**more)(config, params))


VARIANTS: Mapping[str, Variant] = {
    "phi3-mha-window": phi3(
        {"num_key_value_heads": None, "sliding_window": 17, "rms_norm_eps": 0.1},
        {
            "window": window(None),
            "norm_eps": settings(norm_eps=1e-5),
            "untied": embedding_as_head,
            "head order": rolled_kv_heads,
        },
    ),
    # The three prompts are longer than the original length, cross it, and stay below it.
    "phi3-gqa-tied-longrope-partial": phi3(
        {
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 41,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": SHORT,
                "long_factor": LONG,
            },
        },
        {
            "longrope": rope(scaling=None),
            "partial rotation": whole_heads,
            "theta": rope(theta=1e4),
            "grouping": rolled_kv_heads,
            "short factors": scaling(short_factors=tuple(LONG)),
            "long factors": scaling(long_factors=tuple(SHORT)),
            "original length": scaling(original_max_position=60, attention_factor=1.0),
            "attention factor": scaling(attention_factor=1.0),
        },
    ),
    "phi3-window-longrope-attention_factor": phi3(
        {
            "sliding_window": 24,
            "original_max_position_embeddings": 60,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "attention_factor": 1.5,
                "short_factor": SHORT,
                "long_factor": LONG,
            },
        },
        {
            "window": window(None),
            "long factors": scaling(long_factors=tuple(SHORT)),
            "attention_factor": scaling(attention_factor=None),
        },
    ),
}
