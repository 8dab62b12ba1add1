"""Architecture minicpm3: MiniCPM3; no key has its factors, so that they are those of the published model."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3, read_longrope
from jaxinfer.checkpoint.gguf.config import FileTensors, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_FACTORS = MappingProxyType({"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256})
_PLAIN_ATTENTION = ("attn_q", "attn_k", "attn_v")


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    sizes = read_sizes(reader, tensors)
    heads, turning = sizes["num_attention_heads"], reader.positive_int("rope.dimension_count")
    if sizes["num_key_value_heads"] != heads:
        raise reader.refuse("attention.head_count_kv", f"latent attention has as many as queries ({heads})")
    width = reader.positive_int("attention.key_length")
    if width <= turning:
        raise reader.refuse("attention.key_length", f"{turning} of it rotate, and some must not")
    length = sizes["max_position_embeddings"]
    original = reader.positive_int("rope.scaling.original_context_length", default=length)
    scaling = read_longrope(reader, tensors, turning, length, original)
    return {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        **sizes,
        **_FACTORS,
        "kv_lora_rank": reader.positive_int("attention.kv_lora_rank"),
        "q_lora_rank": reader.positive_int("attention.q_lora_rank"),
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        # The converter leaves it out, and llama.cpp divides the model's width.
        "v_head_dim": reader.positive_int("attention.value_length", default=max(1, sizes["hidden_size"] // heads)),
        "rope_theta": reader.positive_float("rope.freq_base", default=10000.0),
        "rope_scaling": scaling and {**scaling, "original_max_position_embeddings": original},
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
    }


MINICPM3 = Architecture(
    name="minicpm3",
    translate=_translate,
    top=TOP,
    block=MappingProxyType(
        {
            **{part: name for part, name in BLOCK.items() if part not in _PLAIN_ATTENTION},
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        }
    ),
    rope_divisors=PHI3.rope_divisors,
)
