"""Architectures bloom and mpt: scores that fall with the distance, and queries, keys and values in one tensor."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gpt_relatives import FUSED
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _bloom(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    read_derived_head_dim(reader)
    sizes = _read_sizes(reader, tensors)
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "num_attention_heads": sizes["num_attention_heads"],
        "seq_length": sizes["max_position_embeddings"],
        "layer_norm_epsilon": reader.positive_float("attention.layer_norm_epsilon"),
        **{key: sizes[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _mpt(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    read_derived_head_dim(reader)
    sizes = _read_sizes(reader, tensors)
    largest = reader.optional_float("attention.max_alibi_bias")
    if largest is None:
        raise reader.refuse("attention.max_alibi_bias", "models without it have learned positions")
    clip = reader.optional_float("attention.clamp_kqv") or None
    return {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "vocab_size": sizes["vocab_size"],
        "d_model": sizes["hidden_size"],
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "max_seq_len": sizes["max_position_embeddings"],
        "layer_norm_epsilon": reader.positive_float("attention.layer_norm_epsilon"),
        "attn_config": {"alibi": True, "alibi_bias_max": largest, "clip_qkv": clip},
        **{key: sizes[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _read_sizes(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Read sizes: each head has keys of its own, and the feed-forward part four times the model's width."""
    sizes = read_sizes(reader, tensors)
    for key, found, expected in (
        ("attention.head_count_kv", sizes["num_key_value_heads"], sizes["num_attention_heads"]),
        ("feed_forward_length", sizes["intermediate_size"], 4 * sizes["hidden_size"]),
    ):
        if found != expected:
            raise reader.refuse(key, f"it must be {expected}")
    return sizes


BLOOM = Architecture(
    name="bloom",
    translate=_bloom,
    top=MappingProxyType(
        {
            "token_embd.weight": "transformer.word_embeddings.weight",
            "token_embd_norm.weight": "transformer.word_embeddings_layernorm.weight",
            "token_embd_norm.bias": "transformer.word_embeddings_layernorm.bias",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        }
    ),
    block=MappingProxyType(
        {
            **FUSED,
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        }
    ),
    layers="transformer.h",
    grouped=MappingProxyType({"attn_qkv": ("num_attention_heads", "num_attention_heads")}),
    rope_divisors=(),
)
MPT = Architecture(
    name="mpt",
    translate=_mpt,
    top=MappingProxyType(
        {
            "token_embd.weight": "transformer.wte.weight",
            "output_norm.weight": "transformer.norm_f.weight",
            "output.weight": "lm_head.weight",
        }
    ),
    block=MappingProxyType(
        {
            "attn_norm": "norm_1",
            "ffn_norm": "norm_2",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        }
    ),
    layers="transformer.blocks",
    rope_divisors=(),
)
