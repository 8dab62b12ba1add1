"""OPT, and Galactica, saved as OPT: learned positions, LayerNorm, ReLU and biases; the 350M has post-norms."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
OFFSET = 2  # rows of the position table before the first token's


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` opt."""
    reader = ConfigReader(config, family="opt")
    return reader.finish(read_opt_keys(reader, "opt"))


def read_opt_keys(reader: ConfigReader, family: str) -> DecoderConfig:
    """Return the decoder that the keys say which OPT and its relatives share."""
    num_heads = reader.positive_int("num_attention_heads", default=12)
    model_dim = reader.positive_int("hidden_size", default=768)
    if model_dim % num_heads:
        raise reader.refuse("num_attention_heads", num_heads, f"it must divide hidden_size ({model_dim})")
    embedding_dim = reader.positive_int("word_embed_proj_dim", default=model_dim)
    norm_first = reader.boolean("do_layer_norm_before", default=True)
    removes_final_norm = reader.boolean("_remove_final_layer_norm", default=False)
    has_bias = reader.boolean("enable_bias", default=True)
    return DecoderConfig(
        family=family,
        vocab_size=reader.positive_int("vocab_size", default=50272),
        num_layers=reader.positive_int("num_hidden_layers", default=12, most=1000),
        model_dim=model_dim,
        ffn_dim=reader.positive_int("ffn_dim", default=3072),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=model_dim // num_heads,
        max_position=reader.positive_int("max_position_embeddings", default=2048),
        norm_eps=1e-5,
        layer_pattern=(LayerKind(rope=None),),
        block="pre_norm" if norm_first else "post_norm",
        norm="layer" if reader.boolean("layer_norm_elementwise_affine", default=True) else "plain_layer",
        activation=reader.choice("activation_function", _ACTIVATIONS, default="relu"),
        gated_mlp=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        embedding_dim=None if embedding_dim == model_dim else embedding_dim,
        learned_positions=OFFSET,
        final_norm=norm_first and not removes_final_norm,
        tied_embeddings=reader.boolean("tie_word_embeddings", default=True),
        bos_token_id=reader.optional_token("bos_token_id", default=2),
        eos_token_ids=reader.tokens("eos_token_id", default=(2,)),
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of an opt checkpoint."""
    decoder, layer = "model.decoder", "model.decoder.layers.{layer}"
    top = {
        "embed.embedding": f"{decoder}.embed_tokens.weight",
        "positions.embedding": f"{decoder}.embed_positions.weight",
        "project_in.kernel": f"{decoder}.project_in.weight",
        "project_out.kernel": f"{decoder}.project_out.weight",
        "final_norm.scale": f"{decoder}.final_layer_norm.weight",
        "final_norm.bias": f"{decoder}.final_layer_norm.bias",
    }
    if not config.tied_embeddings:
        top["head.kernel"] = "lm_head.weight"
    parts = {
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    }
    block = {}
    for ours, theirs in parts.items():
        block[f"{ours}.{'scale' if ours.endswith('norm') else 'kernel'}"] = f"{layer}.{theirs}.weight"
        block[f"{ours}.bias"] = f"{layer}.{theirs}.bias"
    ignored = (r"lm_head\.weight",) if config.tied_embeddings else ()
    return TensorNames(top, block, ignored, optional_prefix="model.")


OPT = Family("opt", ("OPTForCausalLM",), translate, tensor_names)
