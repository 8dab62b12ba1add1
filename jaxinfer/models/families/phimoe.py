"""Phi-3.5-MoE: Mixtral with LayerNorms, biases, rope for long contexts, and a router that compares experts in pairs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.families.keys.windows import read_window

_DEFAULTS = sizes(32064, 4096, 6400, 32, 32, 8, None, 131072)
_SIZES = (("num_local_experts", 16), ("num_experts_per_tok", 2), ("intermediate_size", 6400))
_LINEARS = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})
_SECTIONS = ("rope_scaling", "rope_parameters")


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` phimoe."""
    reader = ConfigReader(_with_attention_factor(config), family="phimoe")
    rope = partial(read_rope, theta=1e6)
    decoder = read_llama_keys(reader, "phimoe", _DEFAULTS, 1, (2,), norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    (kind,) = decoder.layer_pattern
    scaling = kind.rope.scaling if kind.rope is not None else None
    if scaling is not None and (scaling.kind != "longrope" or scaling.attention_factor is None):
        raise reader.refuse("rope_scaling", scaling.kind, "phimoe has longrope with short_mscale and long_mscale alone")
    experts = read_experts(reader, _SIZES, scoring="sparse_mixer", normalised=False)
    if experts is not None and experts.per_token != 2:
        raise reader.refuse("num_experts_per_tok", experts.per_token, "transformers chooses two, whatever it says")
    jitter = reader.optional_float("router_jitter_noise")
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(
        replace(
            decoder,
            layer_pattern=(LayerKind(kind.rope, read_window(reader, default=None)),),
            experts=experts and replace(experts, spread=2 * (0.01 if jitter is None else jitter)),
            norm="layer",
            qkv_bias=bias,
            output_bias=bias,
            head_bias=reader.boolean("lm_head_bias", default=False),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Mixtral's, and biases of norms and of the output matrix."""
    names = with_experts(config, llama_names.tensor_names(config), mlp="block_sparse_moe", linears=_LINEARS)
    return replace(names, top={**names.top, "head_bias.bias": "lm_head.bias"}) if config.head_bias else names


def _with_attention_factor(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say in the word of other families by what the rotation multiplies, which is the same for short and long texts."""
    changed = dict(config)
    for name in _SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping) and "short_mscale" in section:
            short, long = section["short_mscale"], section.get("long_mscale")
            if short != long:
                reader = ConfigReader(config, family="phimoe")
                raise reader.refuse(f"{name}.long_mscale", long, f"it must be short_mscale ({short})")
            others = {key: value for key, value in section.items() if key not in ("short_mscale", "long_mscale")}
            changed[name] = {**others, "attention_factor": short}
    return changed


PHIMOE = Family("phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), translate, tensor_names)
