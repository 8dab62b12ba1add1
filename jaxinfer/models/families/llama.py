"""Llama 1, 2 and 3.x and everything saved as ``LlamaForCausalLM``: SmolLM2, TinyLlama, Vicuna, OpenLlama."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.config_reader import ConfigReader
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.rope import read_rope


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` llama."""
    reader = ConfigReader(config, family="llama")
    num_heads = reader.positive_int("num_attention_heads", default=32)
    model_dim = reader.positive_int("hidden_size", default=4096)
    num_kv_heads = reader.positive_int("num_key_value_heads", default=num_heads)
    head_dim = reader.positive_int("head_dim", default=model_dim // num_heads)
    max_position = reader.positive_int("max_position_embeddings", default=2048)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise reader.refuse("head_dim", head_dim, "rotary positions need an even head_dim")
    rope = read_rope(reader, max_position, head_dim)
    attention_bias = reader.boolean("attention_bias", default=False)
    return reader.finish(
        DecoderConfig(
            family="llama",
            vocab_size=reader.positive_int("vocab_size", default=32000),
            num_layers=reader.positive_int("num_hidden_layers", default=32, most=1000),
            model_dim=model_dim,
            ffn_dim=reader.positive_int("intermediate_size", default=11008),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=reader.positive_float("rms_norm_eps", default=1e-6),
            layer_pattern=(LayerKind(rope),),
            activation=reader.choice("hidden_act", {"silu": "silu", "swish": "silu"}, default="silu"),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=reader.boolean("mlp_bias", default=False),
            tied_embeddings=reader.boolean("tie_word_embeddings", default=False),
            bos_token_id=reader.optional_token("bos_token_id", default=1),
            eos_token_ids=reader.tokens("eos_token_id", default=(2,)),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a llama checkpoint."""
    top = {"embed.embedding": "model.embed_tokens.weight", "final_norm.scale": "model.norm.weight"}
    ignored = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        top["head.kernel"] = "lm_head.weight"
    block = {
        "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
        "mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    }
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    mlp = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    linears = (("attention", "self_attn", attention, config.qkv_bias), ("mlp", "mlp", mlp, config.mlp_bias))
    for ours, theirs, names, has_bias in linears:
        for name, tensor in names.items():
            block[f"{ours}.{name}.kernel"] = f"model.layers.{{layer}}.{theirs}.{tensor}.weight"
            if has_bias:
                block[f"{ours}.{name}.bias"] = f"model.layers.{{layer}}.{theirs}.{tensor}.bias"
    return TensorNames(top, block, tuple(ignored))


LLAMA = Family("llama", ("LlamaForCausalLM",), translate, tensor_names)
