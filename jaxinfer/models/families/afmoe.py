"""AFMoE (Trinity): gated attention, windows where layers rotate, norms around each part, and sigmoid experts."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import renamed

_DEFAULTS = sizes(200192, 2048, 6144, 32, 16, None, 128, 16384)
_SIZES = (("num_experts", 64), ("num_experts_per_tok", 6), ("moe_intermediate_size", 1408))
_NAMES: Mapping[str, Source] = {
    "attention.gate.kernel": "self_attn.gate_proj.weight",
    "attention_post_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_mlp_layernorm.weight",
    "mlp_post_norm.scale": "post_mlp_layernorm.weight",
}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` afmoe."""
    reader = ConfigReader(config, family="afmoe")
    decoder = read_llama_keys(reader, "afmoe", _DEFAULTS, norm_eps=("rms_norm_eps", 1e-5))
    period = reader.positive_int("global_attn_every_n_layers", default=4)
    (kind,) = decoder.layer_pattern
    unrotated = replace(decoder, layer_pattern=(LayerKind(rope=None),))
    decoder = read_window_layers(reader, unrotated, period, kind.rope, width=1024)
    dense = reader.natural_int("num_dense_layers", default=1)
    experts = read_experts(
        reader, _SIZES, tuple(layer >= dense for layer in range(decoder.num_layers)), scoring="sigmoid"
    )
    shared = reader.natural_int("num_shared_experts", default=2)
    scale = reader.positive_float("route_scale", default=1.0)
    for key, only in (("score_func", "sigmoid"),):
        reader.choice(key, {only: None}, default=only)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        if (groups := reader.positive_int(key, default=1)) != 1:
            raise reader.refuse(key, groups, "transformers chooses among all experts, whatever it says")
    if not reader.boolean("route_norm", default=True):
        raise reader.refuse("route_norm", False, "transformers divides by the sum, whatever it says")
    if experts is not None:
        experts = replace(experts, shared_dim=shared * experts.ffn_dim, scale=scale, correction_bias=True)
    bias = reader.boolean("attention_bias", default=False)
    scaled = math.sqrt(decoder.model_dim) if reader.boolean("mup_enabled", default=False) else None
    return reader.finish(
        replace(
            decoder,
            block="sandwich",
            qk_norm="head",
            attention_gate=True,
            embedding_scale=scaled,
            qkv_bias=bias,
            output_bias=bias,
            experts=experts,
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, the gate, four norms, and those of the experts."""
    names = renamed(config, _NAMES)
    if config.experts is None:
        return names
    names = with_experts(config, names, router="router.gate.weight", shared="mlp.shared_experts")
    correction = "model.layers.{layer}.mlp.expert_bias"
    return replace(names, block={**names.block, "mlp.router.correction": correction})


AFMOE = Family("afmoe", ("AfmoeForCausalLM",), translate, tensor_names)
