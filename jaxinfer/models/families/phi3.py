"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's blocks with fused projections, windows, and rope for long contexts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Part, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.rope import read_rope


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` phi3."""
    # Transformers' default; it takes precedence over a length inside the rope section.
    reader = ConfigReader({"original_max_position_embeddings": 4096, **config}, family="phi3")
    num_heads = reader.positive_int("num_attention_heads", default=32)
    num_kv_heads = reader.positive_int("num_key_value_heads", default=num_heads)
    model_dim = reader.positive_int("hidden_size", default=3072)
    head_dim = reader.positive_int("head_dim", default=model_dim // num_heads)
    max_position = reader.positive_int("max_position_embeddings", default=4096)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    window = reader.positive_int("sliding_window") if reader.has("sliding_window") else None
    rope = read_rope(reader, max_position, head_dim, partial=1.0)
    if rope.scaling is not None and rope.scaling.kind != "longrope":
        raise reader.refuse("rope_scaling", rope.scaling.kind, "phi3 has no kind of scaling but longrope")
    return reader.finish(
        DecoderConfig(
            family="phi3",
            vocab_size=reader.positive_int("vocab_size", default=32064),
            num_layers=reader.positive_int("num_hidden_layers", default=32, most=1000),
            model_dim=model_dim,
            ffn_dim=reader.positive_int("intermediate_size", default=8192),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=reader.positive_float("rms_norm_eps", default=1e-5),
            layer_pattern=(LayerKind(rope, window),),
            activation=reader.choice("hidden_act", {"silu": "silu", "swish": "silu"}, default="silu"),
            tied_embeddings=reader.boolean("tie_word_embeddings", default=False),
            bos_token_id=reader.optional_token("bos_token_id", default=1),
            eos_token_ids=reader.tokens("eos_token_id", default=(32000,)),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a phi3 checkpoint: query, key and value are fused, and gate and up are fused."""
    names = llama_names.tensor_names(config)
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, total = "model.layers.{layer}.self_attn.qkv_proj.weight", query + 2 * key_value
    gate_up = "model.layers.{layer}.mlp.gate_up_proj.weight"
    fused = {
        "attention.query.kernel": Part(qkv, 0, total),
        "attention.key.kernel": Part(qkv, query, total),
        "attention.value.kernel": Part(qkv, query + key_value, total),
        "mlp.gate.kernel": Part(gate_up, 0, 2 * config.ffn_dim),
        "mlp.up.kernel": Part(gate_up, config.ffn_dim, 2 * config.ffn_dim),
    }
    return replace(names, block={**names.block, **fused})


PHI3 = Family("phi3", ("Phi3ForCausalLM",), translate, tensor_names)
