"""Llama 4's text decoder: chunks where layers rotate, queries that grow where they do not, and shared experts.

Published checkpoints have a vision model too, which is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope, Sharpening, shortest_pattern
from jaxinfer.models.families.family import TEXT_ALONE, Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import halves_of_stacks, single_matrices, single_stacks
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import interleaved, renamed
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.families.keys.windows import read_chunks, read_rotating_layers
from jaxinfer.models.rope_frequencies import static_frequencies

_DEFAULTS = sizes(202048, 5120, 8192, 48, 40, 8, 128, 131072)
_SIZES = (("num_local_experts", 16), ("num_experts_per_tok", 1), ("intermediate_size", 8192))
_LINEARS = MappingProxyType({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_IGNORED = (r"(vision_model|multi_modal_projector)\..*",)


def translate_text(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` llama4_text."""
    # The first files have a number for the first, of which only counts whether it is 0; no list says as much as none.
    words = {"attn_temperature_tuning": bool(config.get("attn_temperature_tuning", True))}
    reader = ConfigReader({**config, **words, "no_rope_layers": config.get("no_rope_layers") or None}, "llama4_text")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(reader, "llama4_text", _DEFAULTS, 1, (2,), norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    has_norms = reader.boolean("use_qk_norm", default=True)
    (kind,) = decoder.layer_pattern
    if has_norms and kind.rope is not None and static_frequencies(kind.rope)[1] != 1.0:
        raise reader.refuse("use_qk_norm", True, "it would undo the attention factor of the rotary scaling")
    step = reader.positive_int("interleave_moe_layer_step", default=1)
    sparse = tuple((layer + 1) % step == 0 for layer in range(decoder.num_layers))
    if reader.has("moe_layers"):
        places = reader.places("moe_layers", decoder.num_layers)
        sparse = tuple(layer in places for layer in range(decoder.num_layers))
    experts = read_experts(reader, _SIZES, sparse, scoring="chosen_sigmoid", normalised=False)
    return reader.finish(
        replace(
            decoder,
            ffn_dim=reader.positive_int("intermediate_size_mlp", default=16384),
            layer_pattern=shortest_pattern(_read_kinds(reader, decoder.num_layers, kind.rope)),
            experts=experts and replace(experts, shared_dim=experts.ffn_dim, scales_inputs=True),
            qk_norm="rotated_heads" if has_norms else None,
            **dict.fromkeys(("qkv_bias", "output_bias"), reader.boolean("attention_bias", default=False)),
        )
    )


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate the text decoder of a ``config.json`` of ``model_type`` llama4."""
    reader = ConfigReader(config, family="llama4")
    if reader.section("text_config") is None:
        raise UnsupportedModel("config.json (llama4): text_config is missing")
    return reader.finish(replace(translate_text(config["text_config"]), family="llama4"))


def text_tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's with another name for the feed-forward part, and one or many for experts."""
    block: dict[str, Any] = {f"mlp.{ours}.kernel": f"feed_forward.{name}.weight" for ours, name in _LINEARS.items()}
    others: tuple[Mapping[str, Source], ...] = ()
    if config.experts is not None:
        shared = {f"mlp.shared.{ours}.kernel": f"shared_expert.{name}.weight" for ours, name in _LINEARS.items()}
        shared["mlp.router.weights"] = "router.weight"
        block |= {path: f"feed_forward.{name}" for path, name in shared.items()}
        block |= halves_of_stacks(config, "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
        # As who quantizes the model takes them apart, and as GGUF files have them.
        others = (single_matrices(config, "model.layers.{layer}.feed_forward."), single_stacks(config))
    return replace(interleaved(config, renamed(config, block)), others=others)


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a checkpoint with a vision model."""
    names = text_tensor_names(config).moved("", "language_model.")
    return replace(names, ignored=(*names.ignored, *_IGNORED), notice=TEXT_ALONE)


def _read_kinds(reader: ConfigReader, num_layers: int, rope: Rope | None) -> tuple[LayerKind, ...]:
    """Return every layer's kind: without rotary positions, queries may grow with their place."""
    rotates = read_rotating_layers(reader, num_layers)
    strength = reader.optional_float("attn_scale")
    growth = Sharpening(0.1 if strength is None else strength, reader.positive_int("floor_scale", default=8192))
    unrotated = LayerKind(None, sharpening=growth if reader.boolean("attn_temperature_tuning") else None)
    kinds = (LayerKind(rope) if turns else unrotated for turns in rotates)
    chunks = read_chunks(reader, rotates)
    return tuple(replace(kind, window=size, chunked=size is not None) for kind, size in zip(kinds, chunks))


LLAMA4_TEXT = Family("llama4_text", ("Llama4ForCausalLM",), translate_text, text_tensor_names)
LLAMA4 = Family("llama4", ("Llama4ForConditionalGeneration",), translate, tensor_names)
