"""HyperCLOVA X and Granite Swash: Granite with norms around each part, or with windows and learned attention sinks."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families import granite_moe
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.granite import read_granite_keys
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_names import joined_stacks
from jaxinfer.models.families.keys.llama_keys import sizes
from jaxinfer.models.families.keys.llama_names import renamed, tensor_names
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

# What an absent key means.
_SWASH = MappingProxyType(
    {
        **sizes(100352, 2560, 8192, 24, 20, 4, None, 8192),
        "rms_norm_eps": 1e-5,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "tie_word_embeddings": True,
    }
)
_SINKS: Mapping[str, Source] = {"attention.sink_logits": "model.layers.{layer}.self_attn.sinks"}
_AROUND: Mapping[str, Source] = {
    "attention_post_norm.scale": "post_norm1.weight",
    "mlp_post_norm.scale": "post_norm2.weight",
}


def translate_hyperclovax(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` hyperclovax, whose ``logits_scaling`` multiplies."""
    reader = ConfigReader(config, family="hyperclovax")
    decoder = read_granite_keys(reader, "hyperclovax")
    scale = decoder.attention_scale if reader.has("attention_multiplier") else None
    return reader.finish(
        replace(
            decoder,
            block="sandwich" if reader.boolean("use_post_norm", default=True) else "pre_norm",
            attention_scale=None if scale == decoder.head_dim**-0.5 else scale,
            logit_scale=reader.positive_float("logits_scaling", default=1.0),
            mlp_bias=reader.boolean("mlp_bias", default=False),
        )
    )


def hyperclovax_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and norms after both parts."""
    return renamed(config, _AROUND) if config.block == "sandwich" else tensor_names(config)


def translate_swash(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granite_swa."""
    reader = ConfigReader({**_SWASH, **config}, family="granite_swa")
    decoder = _with_windows(reader, read_granite_keys(reader, "granite_swa"))
    return reader.finish(replace(decoder, mlp_bias=reader.boolean("mlp_bias", default=False)))


def swash_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and the sinks."""
    names = tensor_names(config)
    return replace(names, block={**names.block, **_SINKS})


def translate_swash_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granitemoe_swa."""
    reader = ConfigReader(config, family="granitemoe_swa")
    return reader.finish(_with_windows(reader, granite_moe.read_shared(reader, "granitemoe_swa")))


def swash_moe_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: those of Granite's mixtures, by other words, and the sinks."""
    names, inside = granite_moe.expert_tensor_names(config), "block_sparse_moe"
    stacks = joined_stacks(config, f"{inside}.experts.gate_up_proj", f"{inside}.experts.down_proj")
    router = {"mlp.router.weights": f"model.layers.{{layer}}.{inside}.router.weight"}
    return replace(names, block={**names.block, **stacks, **router, **_SINKS})


def _with_windows(reader: ConfigReader, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with windows, without ``layer_types`` in three layers of four; each layer has its own base."""
    (whole,), count = decoder.layer_pattern, decoder.num_layers
    width, slides = read_window(reader, default=128), read_layer_types(reader, count)
    slides = tuple(layer % 4 != 0 for layer in range(count)) if slides is None else slides
    if any(slides) and width is None:
        raise reader.refuse("sliding_window", None, "some layers have a window (layer_types); write its width")
    assert whole.rope is not None
    bases = reader.numbers("layer_rope_theta", count) if reader.has("layer_rope_theta") else (whole.rope.theta,) * count
    ropes = [replace(whole.rope, theta=base) if base else None for base in bases]
    layers = tuple(LayerKind(rope, width if is_local else None) for rope, is_local in zip(ropes, slides))
    return replace(decoder, layer_pattern=shortest_pattern(layers), attention_sinks=True)


HYPERCLOVAX = Family("hyperclovax", ("HyperCLOVAXForCausalLM",), translate_hyperclovax, hyperclovax_names)
GRANITE_SWA = Family("granite_swa", ("GraniteSWAForCausalLM",), translate_swash, swash_names)
GRANITE_MOE_SWA = Family("granitemoe_swa", ("GraniteMoeSWAForCausalLM",), translate_swash_moe, swash_moe_names)
