"""Architecture llama4: Llama 4's text decoder. What no key holds is that of the published models."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import read_relative
from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.experts import STACKS, read_expert_counts
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_CHUNK = _FLOOR = 8192
_PERIOD = 4
# Maverick's, whose queries and keys are not normed.
_EXPERTS_WITHOUT_NORMS = 128
_LINEARS = ("gate", "up", "down")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "llama4_text", "Llama4ForCausalLM")
    if reader.has("attention.sliding_window"):
        raise reader.refuse("attention.sliding_window", "layers that all rotate and see everything are no Llama 4's")
    counts = read_expert_counts(reader, "num_local_experts")
    return {
        **config,
        **counts,
        "hidden_act": "silu",
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": reader.positive_int("expert_feed_forward_length"),
        "interleave_moe_layer_step": reader.positive_int("interleave_moe_layer_step"),
        "use_qk_norm": counts["num_local_experts"] != _EXPERTS_WITHOUT_NORMS,
        "attention_chunk_size": _CHUNK,
        "no_rope_layer_interval": _PERIOD,
        "attn_temperature_tuning": True,
        "floor_scale": _FLOOR,
        "attn_scale": 0.1,
    }


LLAMA4 = Architecture(
    "llama4",
    _translate,
    TOP,
    MappingProxyType(
        {
            **BLOCK,
            **STACKS,
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in _LINEARS},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in _LINEARS},
            "ffn_gate_inp": "feed_forward.router",
        }
    ),
)
