"""GPT-2 and DistilGPT-2: learned positions, LayerNorm, and kernels stored ``[in, out]`` with q, k and v fused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gpt2."""
    reader = ConfigReader(config, family="gpt2")
    decoder = read_gpt2_keys(reader, "gpt2")
    scales = reader.boolean("scale_attn_weights", default=True)
    # It only changes the order of computation, for 16-bit training.
    reader.boolean("reorder_and_upcast_attn", default=False)
    by_depth = reader.boolean("scale_attn_by_inverse_layer_idx", default=False)
    return reader.finish(replace(decoder, attention_scale=None if scales else 1.0, scores_by_depth=by_depth))


def read_gpt2_keys(reader: ConfigReader, family: str) -> DecoderConfig:
    """Return the decoder that the keys say which GPT-2 and its relatives share."""
    num_heads = reader.positive_int("n_head", default=12)
    model_dim = reader.positive_int("n_embd", default=768)
    if model_dim % num_heads:
        raise reader.refuse("n_head", num_heads, f"it must divide n_embd ({model_dim})")
    return DecoderConfig(
        family=family,
        vocab_size=reader.positive_int("vocab_size", default=50257),
        num_layers=reader.positive_int("n_layer", default=12, most=1000),
        model_dim=model_dim,
        ffn_dim=reader.positive_int("n_inner", default=4 * model_dim),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=model_dim // num_heads,
        max_position=reader.positive_int("n_positions", default=1024),
        norm_eps=reader.positive_float("layer_norm_epsilon", default=1e-5),
        layer_pattern=(LayerKind(rope=None),),
        norm="layer",
        activation=reader.choice("activation_function", _ACTIVATIONS, default="gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        learned_positions=0,
        tied_embeddings=reader.boolean("tie_word_embeddings", default=True),
        bos_token_id=reader.optional_token("bos_token_id", default=50256),
        eos_token_ids=reader.tokens("eos_token_id", default=(50256,)),
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a gpt2 checkpoint."""
    layer = "transformer.h.{layer}"
    top: dict[str, Source] = {
        "embed.embedding": "transformer.wte.weight",
        "positions.embedding": "transformer.wpe.weight",
        "final_norm.scale": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    block: dict[str, Source] = {}
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        block[f"{ours}.scale"] = f"{layer}.{theirs}.weight"
        block[f"{ours}.bias"] = f"{layer}.{theirs}.bias"
    for ours, theirs in (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        block[f"{ours}.kernel"] = Part(f"{layer}.{theirs}.weight", transposed=True)
        block[f"{ours}.bias"] = f"{layer}.{theirs}.bias"
    for index, ours in enumerate(("attention.query", "attention.key", "attention.value")):
        first, total = index * config.model_dim, 3 * config.model_dim
        block[f"{ours}.kernel"] = Part(f"{layer}.attn.c_attn.weight", first, total, transposed=True)
        block[f"{ours}.bias"] = Part(f"{layer}.attn.c_attn.bias", first, total)
    ignored = [r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"]  # the causal mask, once saved as a buffer
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        top["head.kernel"] = "lm_head.weight"
    return TensorNames(top, block, tuple(ignored), optional_prefix="transformer.")


GPT_SW3 = Family("gpt-sw3", ("GPT2LMHeadModel",), translate, tensor_names)
GPT2 = Family("gpt2", ("GPT2LMHeadModel",), translate, tensor_names)
