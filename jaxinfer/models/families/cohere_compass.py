"""Cohere Compass: Command R7B with rotated halves, and rotary positions of each kind of layer, or none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope, shortest_pattern
from jaxinfer.models.families.cohere import read_cohere_keys
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import sizes
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.rope import read_section
from jaxinfer.models.families.keys.windows import read_layer_types, read_window

_NAME = "cohere_compass_text"
_DEFAULTS = sizes(256000, 8192, 22528, 40, 64, None, None, 8192)
_KINDS = ("full_attention", "sliding_attention")
_ROPES = "rope_parameters"
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_BESIDE = ("rope_theta", "rope_type")  # the first files have them beside the kinds, where nothing reads them


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` cohere_compass_text."""
    reader = ConfigReader({**config, _ROPES: _of_kinds(config.get(_ROPES))}, family=_NAME)
    scale = reader.optional_float("logit_scale")
    if scale == 0:
        raise reader.refuse("logit_scale", 0, "it must be above 0, or null")
    # Each kind has its own rotary positions below.
    decoder = read_cohere_keys(reader, _NAME, _DEFAULTS, lambda _reader, _length, head_dim: Rope(1e4, head_dim), scale)
    width, slides = read_window(reader, default=4096), read_layer_types(reader, decoder.num_layers)
    slides = slides or (False,) * decoder.num_layers
    if any(slides) and width is None:
        raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
    ropes = _read_ropes(reader, decoder, {_KINDS[slide] for slide in slides})
    pattern = (LayerKind(ropes.get(_KINDS[slide]), width if slide else None) for slide in slides)
    return reader.finish(replace(decoder, layer_pattern=shortest_pattern(tuple(pattern))))


def _of_kinds(ropes: Any) -> Any:
    """Return the sections of the kinds of layers, without what images need and what stands beside them."""
    if not isinstance(ropes, Mapping):
        return ropes
    kinds = {key: value for key, value in ropes.items() if key not in _BESIDE}
    return {key: _of_text(value) if isinstance(value, Mapping) else value for key, value in kinds.items()}


def _of_text(section: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in section.items() if key not in _OF_IMAGES}


def _read_ropes(reader: ConfigReader, decoder: DecoderConfig, used: set[str]) -> Mapping[str, Rope]:
    """Return the rotary positions of the kinds of layers that rotate; a kind that does not is null."""
    sections, ropes = reader.section(_ROPES) or ConfigReader({}, _NAME, f"{_ROPES}."), {}
    for kind in _KINDS:
        section = sections.section(kind)
        if section is not None:
            theta = section.positive_float("rope_theta")
            ropes[kind] = read_section(reader, section, decoder.max_position, decoder.head_dim, theta)
        elif kind in used and not sections.is_null(kind):
            why = "is missing or empty: write these layers' rotary positions, or null if they do not rotate"
            raise UnsupportedModel(f"config.json ({_NAME}): {_ROPES}.{kind} {why}")
    return sections.finish(ropes)


COHERE_COMPASS_TEXT = Family(_NAME, ("CohereCompassForCausalLM",), translate, tensor_names)
