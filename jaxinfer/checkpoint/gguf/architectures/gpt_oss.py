"""Architecture gpt-oss: experts and learned attention sinks in every layer, a window in every other one."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, add_turn_ends, read_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.experts import CHOSEN_SOFTMAX, STACKS, read_expert_counts
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_DENSE = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_TURN_ENDS = ("<|return|>", "<|call|>")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    sizes, counts = read_sizes(reader, tensors), read_expert_counts(reader, "num_local_experts", gating=CHOSEN_SOFTMAX)
    width = reader.positive_int("expert_feed_forward_length", default=sizes["intermediate_size"])
    rotary = read_rotary(reader, tensors, head_dim)
    scaling = rotary["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        # Of the model's own; llama.cpp rounds the lanes between which frequencies change.
        rotary = {**rotary, "rope_scaling": {**scaling, "truncate": False}}
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **sizes,
        **rotary,
        **counts,
        "intermediate_size": width,
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "sliding_window": reader.positive_int("attention.sliding_window"),
        "attention_bias": True,
    }
    if rotary["rope_scaling"] is None:  # an absent key would stand for the published models' scaling
        config |= {"rope_scaling": {"rope_type": "default"}}
    return add_turn_ends(config, reader, _TURN_ENDS)


GPT_OSS = Architecture(
    name="gpt-oss",
    translate=_translate,
    top=TOP,
    block=MappingProxyType(
        {
            **{part: name for part, name in BLOCK.items() if part not in _DENSE},
            **STACKS,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    ),
)
