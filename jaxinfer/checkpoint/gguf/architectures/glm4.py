"""Architecture glm4: the GLM-4 models of 2025, with gate and up fused; rows stay in the folder's order."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, add_turn_ends, read_head_dim, read_partial_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.checkpoint.gguf.rope import read_rope_scaling

_TURN_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    rotary_dim, rotary_share = read_partial_rotary(reader, head_dim)
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    max_position = reader.positive_int("context_length")
    config = {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        **read_sizes(reader, tensors),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(reader, None, theta, rotary_dim, max_position),
        "partial_rotary_factor": rotary_share,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors.names,
    }
    return add_turn_ends(config, reader, _TURN_ENDS)


_PARTS = {
    **{part: name for part, name in BLOCK.items() if part != "ffn_gate"},
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
GLM4 = Architecture(name="glm4", translate=_translate, top=TOP, block=MappingProxyType(_PARTS), rope_divisors=())
