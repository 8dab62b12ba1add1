"""Architecture gpt2: learned positions, biases everywhere, matrices that Hugging Face stores as ``[in, out]``."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    num_heads = reader.positive_int("attention.head_count")
    if reader.positive_int("attention.head_count_kv", default=num_heads) != num_heads:
        raise reader.refuse("attention.head_count_kv", f"it must equal the number of heads, {num_heads}")
    return read_gpt2(reader, tensors)


def read_gpt2(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Return the configuration of a GPT-2, without its number of key/value heads."""
    read_derived_head_dim(reader)
    sizes = read_sizes(reader, tensors)
    model_dim = sizes["hidden_size"]
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes["vocab_size"],
        "n_positions": sizes["max_position_embeddings"],
        "n_embd": model_dim,
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": None if sizes["intermediate_size"] == 4 * model_dim else sizes["intermediate_size"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": reader.positive_float("attention.layer_norm_epsilon"),
        **{key: sizes[key] for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    }


GPT2 = Architecture(
    name="gpt2",
    translate=_translate,
    top=MappingProxyType(
        {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        }
    ),
    block=MappingProxyType(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        }
    ),
    layers="transformer.h",
    transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    rope_divisors=(),
)
