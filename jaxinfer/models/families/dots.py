"""dots.llm1: GLM-4.5's experts, in groups beside a shared one, with norms of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.glm_moe import tensor_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.grouped_experts import Usual, read_grouped_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

_DEFAULTS = sizes(152064, 4608, 10944, 62, 32, 32, None, 2048)
_EXPERTS = Usual((128, 6, 1408), shared=2, normalised=False)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` dots1; layers from ``max_window_layers`` on have the window."""
    reader = ConfigReader(config, family="dots1")
    decoder = read_llama_keys(reader, "dots1", _DEFAULTS)
    count, width = decoder.num_layers, read_window(reader, default=4096)
    slides, first = read_layer_types(reader, count), reader.natural_int("max_window_layers", default=62)
    if slides is None:
        slides = tuple(width is not None and layer >= first for layer in range(count))
    if any(slides) and width is None:
        raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
    (kind,) = decoder.layer_pattern
    layers = tuple(LayerKind(kind.rope, width if is_sliding else None) for is_sliding in slides)
    experts = read_grouped_experts(reader, count, _EXPERTS, "sigmoid")
    bias = reader.boolean("attention_bias", default=False)
    pattern = shortest_pattern(layers)
    return reader.finish(
        replace(decoder, layer_pattern=pattern, experts=experts, qk_norm="head", qkv_bias=bias, output_bias=bias)
    )


DOTS1 = Family("dots1", ("Dots1ForCausalLM",), translate, tensor_names)
