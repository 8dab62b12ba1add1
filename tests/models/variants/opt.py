"""Variants of opt: norms before and after, projections around the blocks, and all that may be left out."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants.variant import Variant, embedding_as_head, settings, zeroed

SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
}


def dtype_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rename what transformers 5 writes of the stored dtype, the one difference of families without rotation."""
    return {"torch_dtype" if key == "dtype" else key: value for key, value in config.items()}


def rolled_positions(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Shift the position table by the two rows that stand before the first token's."""
    table = params["positions"]["embedding"]
    return config, {**params, "positions": {"embedding": np.roll(table, 2, axis=0)}}


def variant(config: Mapping[str, Any], without: Mapping[str, Any]) -> Variant:
    return Variant(config, without, model_type="opt", sizes=SIZES, to_version_4=dtype_to_version_4)


VARIANTS: Mapping[str, Variant] = {
    "opt": variant(
        {},
        {
            "positions": zeroed("positions", "embedding"),
            "offset": rolled_positions,
            "relu": settings(activation="gelu"),
            "final norm": settings(final_norm=False),
            "query bias": zeroed("query", "bias"),
            "value bias": zeroed("value", "bias"),
            "output bias": zeroed("output", "bias"),
            "up bias": zeroed("up", "bias"),
            "down bias": zeroed("down", "bias"),
        },
    ),
    "opt-post_norm-projections": variant(
        {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        {"post_norm": settings(block="pre_norm"), "norm bias": zeroed("mlp_norm", "bias")},
    ),
    "opt-plain-untied-gelu": variant(
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
            "word_embed_proj_dim": 64,
        },
        {"untied": embedding_as_head, "gelu": settings(activation="relu"), "final norm": settings(final_norm=True)},
    ),
}
