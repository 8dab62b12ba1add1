"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward in parallel after one LayerNorm, biases everywhere."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.rope import read_rope

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_LAYER = "model.layers.{layer}"


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` phi."""
    reader = ConfigReader(config, family="phi")
    num_heads = reader.positive_int("num_attention_heads", default=32)
    num_kv_heads = reader.positive_int("num_key_value_heads", default=num_heads)
    model_dim = reader.positive_int("hidden_size", default=2048)
    head_dim = reader.positive_int("head_dim", default=model_dim // num_heads)
    max_position = reader.positive_int("max_position_embeddings", default=2048)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    return reader.finish(
        DecoderConfig(
            family="phi",
            vocab_size=reader.positive_int("vocab_size", default=51200),
            num_layers=reader.positive_int("num_hidden_layers", default=24, most=1000),
            model_dim=model_dim,
            ffn_dim=reader.positive_int("intermediate_size", default=8192),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=reader.positive_float("layer_norm_eps", default=1e-5),
            layer_pattern=(LayerKind(read_rope(reader, max_position, head_dim, partial=0.5)),),
            block="parallel",
            norm="layer",
            activation=reader.choice("hidden_act", _ACTIVATIONS, default="gelu_new"),
            gated_mlp=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            tied_embeddings=reader.boolean("tie_word_embeddings", default=False),
            bos_token_id=reader.optional_token("bos_token_id", default=1),
            eos_token_ids=reader.tokens("eos_token_id", default=(2,)),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a phi checkpoint; a tied head has only its bias."""
    top = {
        "embed.embedding": "model.embed_tokens.weight",
        "final_norm.scale": "model.final_layernorm.weight",
        "final_norm.bias": "model.final_layernorm.bias",
        "head_bias.bias": "lm_head.bias",
    }
    ignored = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        top["head.kernel"] = "lm_head.weight"
    linears = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    }
    block = {
        "attention_norm.scale": f"{_LAYER}.input_layernorm.weight",
        "attention_norm.bias": f"{_LAYER}.input_layernorm.bias",
        **{f"{ours}.kernel": f"{_LAYER}.{theirs}.weight" for ours, theirs in linears.items()},
        **{f"{ours}.bias": f"{_LAYER}.{theirs}.bias" for ours, theirs in linears.items()},
    }
    return TensorNames(top, block, tuple(ignored))


PHI = Family("phi", ("PhiForCausalLM",), translate, tensor_names)
