"""Architectures of models that compute as a family of another name does.

xverse, internlm2, baichuan and pangu-embedded are Llama, qwen is Qwen2, chatglm is GLM-4 of 2024, minicpm has Granite's
factors, orion is StableLM that rotates whole heads, and codeshell is StarCoder2.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.glm4 import GLM4
from jaxinfer.checkpoint.gguf.architectures.grouped_mixtures import read_rotated_dim
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, LLAMA, TOP
from jaxinfer.checkpoint.gguf.architectures.phi3 import PHI3, read_longrope
from jaxinfer.checkpoint.gguf.architectures.qwen2 import QWEN2
from jaxinfer.checkpoint.gguf.architectures.stablelm import STABLELM
from jaxinfer.checkpoint.gguf.architectures.starcoder2 import STARCODER2
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

# Baichuan's models of so many layers do not rotate.
_BAICHUAN_13B = 40
_STACKED: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "attn_qkv": (
            ("self_attn.q_proj", "num_attention_heads"),
            ("self_attn.k_proj", "num_key_value_heads"),
            ("self_attn.v_proj", "num_key_value_heads"),
        )
    }
)


def _baichuan(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    if reader.positive_int("block_count") == _BAICHUAN_13B:
        raise reader.refuse("block_count", "scores of Baichuan 13B fall with the distance; only the 7B rotates")
    return LLAMA.translate(reader, tensors)


def _qwen(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = QWEN2.translate(reader, tensors)
    both = config["intermediate_size"]  # of gate and up
    if both % 2:
        raise reader.refuse("feed_forward_length", "it is the width of gate and up together, which is even")
    return {**config, "intermediate_size": both // 2}


def _chatglm(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    biased = f"blk.0.attn_{'qkv' if 'blk.0.attn_qkv.weight' in tensors.names else 'q'}.bias" in tensors.names
    config = {**GLM4.translate(reader, tensors), "attention_bias": biased}
    return {**config, "architectures": ["GlmForCausalLM"], "model_type": "glm"}


def _minicpm(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return Granite's configuration; where the first files have no factors, they are MiniCPM 2B's."""
    head_dim, sizes = read_rotated_dim(reader, read_derived_head_dim(reader)), read_sizes(reader, tensors)
    length = sizes["max_position_embeddings"]
    original = reader.positive_int("rope.scaling.original_context_length", default=length)
    scaling = read_longrope(reader, tensors, head_dim, length, original)
    depth = 1.4 / math.sqrt(sizes["num_hidden_layers"])
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **sizes,
        "rope_theta": reader.positive_float("rope.freq_base", default=10000.0),
        "rope_scaling": scaling and {**scaling, "original_max_position_embeddings": original},
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": reader.positive_float("embedding_scale", default=12.0),
        "residual_multiplier": reader.positive_float("residual_scale", default=depth),
        "logits_scaling": reader.positive_float("logit_scale", default=sizes["hidden_size"] / 256),
        "attention_bias": False,
    }


def _orion(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {**STABLELM.translate(reader, tensors), "use_parallel_residual": False}


def _codeshell(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {**STARCODER2.translate(reader, tensors), "use_bias": "blk.0.attn_output.bias" in tensors.names}


_GLM = {**{part: name for part, name in BLOCK.items() if part != "ffn_gate"}, "ffn_up": "mlp.gate_up_proj"}
NAMESAKES = (
    Architecture("xverse", LLAMA.translate, TOP, BLOCK, interleaved=LLAMA.interleaved),
    Architecture("internlm2", LLAMA.translate, TOP, BLOCK, interleaved=LLAMA.interleaved),
    Architecture("baichuan", _baichuan, TOP, BLOCK, interleaved=LLAMA.interleaved),
    Architecture("pangu-embedded", LLAMA.translate, TOP, BLOCK),
    Architecture("qwen", _qwen, TOP, BLOCK, fused=_STACKED, rope_divisors=()),
    Architecture("chatglm", _chatglm, TOP, MappingProxyType(_GLM), fused=_STACKED, rope_divisors=()),
    Architecture("minicpm", _minicpm, TOP, BLOCK, interleaved=LLAMA.interleaved, rope_divisors=PHI3.rope_divisors),
    Architecture("orion", _orion, STABLELM.top, BLOCK, rope_divisors=()),
    Architecture("codeshell", _codeshell, STARCODER2.top, STARCODER2.block, fused=_STACKED, rope_divisors=()),
)
