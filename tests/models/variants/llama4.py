"""Variants of Llama 4: chunks, layers without rotary positions, and experts whose inputs are multiplied."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, Rope, RopeScaling, shortest_pattern
from jaxinfer.notation import Params
from tests.models.variants.experts import ALL, experts
from tests.models.variants.variant import Edit, Variant, halves, settings, zeroed

_SIZES = {"head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": 56, "num_local_experts": 4}


def kinds(**changes: Any) -> Edit:
    """Change fields of the kinds that have any other value there than None or False."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        layers = (
            replace(kind, **{name: value for name, value in changes.items() if getattr(kind, name)})
            for kind in config.layers
        )
        return replace(config, layer_pattern=shortest_pattern(tuple(layers))), params

    return edit


WITHOUT: Mapping[str, Edit] = {
    "which experts": ALL["which experts"],
    "gate and up": ALL["gate and up"],
    "scores of inputs": experts(scales_inputs=False),
    "sigmoid": experts(scoring="softmax"),
    "shared expert": zeroed("shared", "down", "kernel"),
    "chunks that do not slide": kinds(chunked=False),
    "chunks": kinds(window=None, chunked=False),
    "growth of queries": kinds(sharpening=None),
    "neighbouring lanes": halves,
}

# Every second layer has experts, every fourth no rotary positions; texts are longer than chunks and intervals.
VARIANTS: Mapping[str, Variant] = {
    "llama4": Variant(
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "attn_scale": 0.4,
            "floor_scale": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {
            **WITHOUT,
            "norms": settings(qk_norm=None),
            "scaling": kinds(rope=Rope(5e5, 16)),
            "factor": kinds(rope=Rope(5e5, 16, RopeScaling("llama3", 16.0, 32))),
        },
        model_type="llama4_text",
    ),
    "llama4-two-bias": Variant(
        {
            **_SIZES,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 12,
            "attn_scale": 0.4,
            "floor_scale": 5,
            "no_rope_layers": [1, 0],
            "use_qk_norm": False,
            "attention_bias": True,
        },
        {**WITHOUT, "how many": experts(per_token=1), "biases": zeroed("query", "bias")},
        model_type="llama4_text",
    ),
}
