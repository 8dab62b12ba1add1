"""DBRX: experts in every layer, bounded queries, keys and values, and LayerNorm without a bias."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.generic_keys import GENERIC_KEYS
from jaxinfer.models.families.keys.llama_keys import read_clip, read_llama_keys, sizes

_DEFAULTS = sizes(32000, 2048, 3584, 24, 16, 1, None, 2048)
_SIZES = (("moe_num_experts", 4), ("moe_top_k", 1), ("intermediate_size", 3584))
_WORDS = MappingProxyType(
    {
        "n_heads": "num_attention_heads",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
        "kv_n_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
    }
)
# What a section repeats, and what it says of training.
_REPEATED = GENERIC_KEYS | {"tie_word_embeddings", "hidden_size", "attn_pdrop", "moe_jitter_eps", "moe_loss_weight"}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` dbrx; what its two sections say is read beside the rest."""
    flat = {_WORDS.get(key, key): value for key, value in config.items()}
    for name in ("attn_config", "ffn_config"):
        if isinstance(section := config.get(name), Mapping):
            del flat[name]
            flat |= {_WORDS.get(key, key): value for key, value in section.items() if key not in _REPEATED}
    reader = ConfigReader(flat, family="dbrx")
    # No key has the epsilon.
    decoder = read_llama_keys(reader, "dbrx", _DEFAULTS, activation="silu", norm_eps=("norm_eps", 1e-5))
    if reader.boolean("uniform_expert_assignment", default=False):
        raise reader.refuse("uniform_expert_assignment", True, "a router chooses the experts")
    function = reader.section("ffn_act_fn")
    if function is not None:
        function.finish(function.choice("name", {"silu": None}, default="silu"))
    power = reader.optional_float("moe_normalize_expert_weights") if "moe_normalize_expert_weights" in flat else 1.0
    if power not in (None, 1.0):
        raise reader.refuse(
            "moe_normalize_expert_weights", power, "weights are divided by their sum (1), or not (null)"
        )
    experts = read_experts(reader, _SIZES, normalised=power is not None)
    if decoder.tied_embeddings:
        raise reader.refuse("tie_word_embeddings", True, "transformers has no DBRX with tied embeddings")
    return reader.finish(replace(decoder, norm="scaled_layer", clip_qkv=read_clip(reader), experts=experts))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a dbrx checkpoint; the rows of all experts are one tensor."""
    layer, experts = "transformer.blocks.{layer}", config.experts
    assert experts is not None
    top: dict[str, Source] = {
        "embed.embedding": "transformer.wte.weight",
        "final_norm.scale": "transformer.norm_f.weight",
        "head.kernel": "lm_head.weight",
    }
    inside, fused = f"{layer}.ffn.experts.mlp", f"{layer}.norm_attn_norm.attn.Wqkv.weight"
    shape = (experts.num_experts * experts.ffn_dim, config.model_dim)
    block: dict[str, Source] = {
        "attention_norm.scale": f"{layer}.norm_attn_norm.norm_1.weight",
        "mlp_norm.scale": f"{layer}.norm_attn_norm.norm_2.weight",
        "attention.output.kernel": f"{layer}.norm_attn_norm.attn.out_proj.weight",
        "mlp.router.weights": f"{layer}.ffn.router.layer.weight",
        "mlp.experts.gate": Part(f"{inside}.w1", shape=shape),
        "mlp.experts.up": Part(f"{inside}.v1", shape=shape),
        "mlp.experts.down": Part(f"{inside}.w2", shape=shape, across=True),
    }
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    total = queries + 2 * keys
    for name, first in (("query", 0), ("key", queries), ("value", queries + keys)):
        block[f"attention.{name}.kernel"] = Part(fused, first, total)
    deep = (experts.num_experts, experts.ffn_dim, config.model_dim)
    in_gguf: dict[str, Source] = {
        "mlp.experts.gate": Part(f"{inside}.w1.weight", shape=deep),
        "mlp.experts.up": Part(f"{inside}.v1.weight", shape=deep),
        "mlp.experts.down": Part(f"{inside}.w2.weight", shape=(deep[0], deep[2], deep[1])),
    }
    return TensorNames(top, block, others=(in_gguf,))


DBRX = Family("dbrx", ("DbrxForCausalLM",), translate, tensor_names)
