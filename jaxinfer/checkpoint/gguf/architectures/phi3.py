"""Architecture phi3: Phi-3, Phi-3.5 and Phi-4, with fused projections and, for long contexts, longrope."""

import math
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import TOP
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    add_turn_ends,
    read_derived_head_dim,
    read_partial_rotary,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader, shortest_decimal
from jaxinfer.errors import InvalidCheckpoint

_TURN_ENDS = ("<|end|>", "<|im_end|>", "<|endoftext|>")
_DIVISORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    rotary_dim, rotary_share = read_partial_rotary(reader, read_derived_head_dim(reader))
    max_position = reader.positive_int("context_length")
    original = reader.positive_int("rope.scaling.original_context_length", default=max_position)
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **read_sizes(reader, tensors),
        "original_max_position_embeddings": original,
        "rope_theta": reader.positive_float("rope.freq_base", default=10000.0),
        "rope_scaling": read_longrope(reader, tensors, rotary_dim, max_position, original),
        "partial_rotary_factor": rotary_share,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "sliding_window": reader.optional_int("attention.sliding_window"),
    }
    return add_turn_ends(config, reader, _TURN_ENDS)


def read_longrope(
    reader: MetadataReader, tensors: FileTensors, rotary_dim: int, max_position: int, original: int
) -> dict[str, Any] | None:
    """Read the divisors of the rotary frequencies for short and for long sequences, and the attention factor."""
    kind = reader.word("rope.scaling.type", default="longrope" if tensors.rope_divisors else "none")
    if kind != ("longrope" if tensors.rope_divisors else "none"):
        raise reader.refuse("rope.scaling.type", "phi3 knows none, and longrope with the tensors rope_factors_*.weight")
    if not tensors.rope_divisors:
        return None
    for name in _DIVISORS:
        divisors = tensors.rope_divisors.get(name, np.zeros(0))
        if divisors.shape != (rotary_dim // 2,) or not np.all((divisors > 0) & np.isfinite(divisors)):
            raise InvalidCheckpoint(
                f"{reader.origin}: tensor {name} must hold {rotary_dim // 2} positive numbers; convert the model again"
            )
    if original == 1 < max_position:
        raise reader.refuse("rope.scaling.original_context_length", "longrope stretches texts of 2 tokens or more")
    short, long = ([shortest_decimal(value) for value in tensors.rope_divisors[name].tolist()] for name in _DIVISORS)
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    stated = reader.positive_float("rope.scaling.attn_factor", default=1.0)
    stretch = math.log(max(1.0, max_position / original))
    derived = math.sqrt(1 + stretch / math.log(original)) if stretch else 1.0
    # Hugging Face derives the same factor from the lengths; only a different one must be given.
    return scaling if math.isclose(stated, derived, rel_tol=1e-6) else scaling | {"attention_factor": stated}


PHI3 = Architecture(
    name="phi3",
    translate=_translate,
    top=TOP,
    block=MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    rope_divisors=_DIVISORS,
)
