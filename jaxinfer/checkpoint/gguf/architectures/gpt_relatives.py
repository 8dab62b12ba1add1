"""Architectures falcon, gptneox and starcoder: queries, keys and values in one tensor, and LayerNorm."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gpt2 import GPT2, read_gpt2
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    read_derived_head_dim,
    read_rotary,
    read_rotated_part,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_LAYERS_OF_20B = 44
GROUPS = ("num_attention_heads", "num_key_value_heads")
# The parts of falcon, gptneox and bloom that have the same names in all three.
FUSED: Mapping[str, str] = MappingProxyType({"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"})


def _falcon(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    sizes = read_sizes(reader, tensors)
    norms = 2 if "blk.0.attn_norm_2.weight" in tensors.names else 1
    # No key says it: with one key/value head, rows have the same order in both forms.
    is_new = sizes["num_key_value_heads"] > 1
    if norms == 2 and not is_new:
        raise reader.refuse("attention.head_count_kv", "two norms come with several key/value heads alone")
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        **sizes,
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "layer_norm_epsilon": reader.positive_float("attention.layer_norm_epsilon"),
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": norms,
    }


def _falcon_norms(config: Mapping[str, Any]) -> dict[str, str]:
    """Name the norms: of two, the first is the feed-forward part's."""
    is_one = config["num_ln_in_parallel_attn"] == 1
    return {"attn_norm": "input_layernorm"} if is_one else {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


def _gptneox(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    sizes = read_sizes(reader, tensors)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **sizes,
        **read_rotated_part(reader, read_derived_head_dim(reader)),
        "layer_norm_eps": reader.positive_float("attention.layer_norm_epsilon"),
        # No key has it: of the published models, one has the approximation.
        "hidden_act": "gelu_fast" if sizes["num_hidden_layers"] == _LAYERS_OF_20B else "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in tensors.names,
        "use_parallel_residual": reader.boolean("use_parallel_residual", default=True),
    }


def _starcoder(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    if reader.positive_int("attention.head_count_kv") != 1:
        raise reader.refuse("attention.head_count_kv", "all queries share one head of keys and values")
    config = read_gpt2(reader, tensors)
    names = {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
    return {**config, **names, "activation_function": "gelu_pytorch_tanh", "multi_query": True}


FALCON = Architecture(
    name="falcon",
    translate=_falcon,
    top=MappingProxyType(
        {
            "token_embd.weight": "transformer.word_embeddings.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        }
    ),
    block=MappingProxyType(
        {
            **FUSED,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        }
    ),
    layers="transformer.h",
    block_of=_falcon_norms,
    grouped=MappingProxyType({"attn_qkv": GROUPS}),
    rope_divisors=(),
)
GPT_NEOX = Architecture(
    name="gptneox",
    translate=_gptneox,
    top=MappingProxyType(
        {
            "token_embd.weight": "gpt_neox.embed_in.weight",
            "output_norm.weight": "gpt_neox.final_layer_norm.weight",
            "output_norm.bias": "gpt_neox.final_layer_norm.bias",
            "output.weight": "embed_out.weight",
        }
    ),
    block=MappingProxyType(
        {
            **FUSED,
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        }
    ),
    layers="gpt_neox.layers",
    grouped=MappingProxyType({"attn_qkv": GROUPS}),
    rope_divisors=(),
)
STARCODER = Architecture(
    name="starcoder",
    translate=_starcoder,
    top=GPT2.top,
    block=GPT2.block,
    layers=GPT2.layers,
    rope_divisors=(),
)
