"""Architecture phi2: Phi-1, Phi-1.5 and Phi-2."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_partial_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.checkpoint.gguf.rope import read_rope_scaling


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    rotary_dim, rotary_share = read_partial_rotary(reader, read_derived_head_dim(reader))
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    max_position = reader.positive_int("context_length")
    return {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        **read_sizes(reader, tensors),
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(reader, None, theta, rotary_dim, max_position),
        "partial_rotary_factor": rotary_share,
        "layer_norm_eps": reader.positive_float("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    }


PHI2 = Architecture(
    name="phi2",
    translate=_translate,
    top=MappingProxyType(
        {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.final_layernorm.weight",
            "output_norm.bias": "model.final_layernorm.bias",
            "output.weight": "lm_head.weight",
            "output.bias": "lm_head.bias",
        }
    ),
    block=MappingProxyType(
        {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        }
    ),
    # Files of the first Phi-2 code fuse what Hugging Face stores separately.
    fused=MappingProxyType(
        {
            "attn_qkv": (
                ("self_attn.q_proj", "num_attention_heads"),
                ("self_attn.k_proj", "num_key_value_heads"),
                ("self_attn.v_proj", "num_key_value_heads"),
            )
        }
    ),
    rope_divisors=(),
)
