"""The ``config.json`` keys that all Gemma families share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxinfer.models.config import DecoderConfig, LayerKind, Rope, shortest_pattern
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.families.keys.windows import read_layer_types, read_window


def read_gemma_keys(
    reader: ConfigReader,
    family: str,
    defaults: Mapping[str, int],
    rope: Callable[[ConfigReader, int, int], Rope] = read_rope,
) -> DecoderConfig:
    """Return a decoder with scaled embeddings and norms whose weights are stored minus one; see `read_llama_keys`."""
    for key in ("head_dim", "num_key_value_heads"):
        if reader.is_null(key):
            raise reader.refuse(key, None, "write the number: null has no meaning for this family")
    decoder = read_llama_keys(reader, family, defaults, 2, (1,), activation="gelu_tanh", tied=True, rope=rope)
    bias = reader.boolean("attention_bias", default=False)
    scale = math.sqrt(decoder.model_dim)
    return replace(decoder, norm="rms_plus_one", embedding_scale=scale, qkv_bias=bias, output_bias=bias)


def read_activation(reader: ConfigReader) -> None:
    """Read ``hidden_activation``, which replaces ``hidden_act`` since Gemma 2."""
    reader.choice("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}, default="gelu_pytorch_tanh")


def read_attention_scale(reader: ConfigReader) -> float:
    """Return the factor of attention scores."""
    return reader.positive_float("query_pre_attn_scalar", default=256.0) ** -0.5


def read_softcap(reader: ConfigReader, key: str, default: float | None) -> float | None:
    """Return the soft-cap of scores or logits; None if the key is null."""
    cap = reader.optional_float(key)
    if cap == 0:
        raise reader.refuse(key, 0, "it must be above 0, or null")
    return default if cap is None and not reader.is_null(key) else cap


def read_window_layers(
    reader: ConfigReader, decoder: DecoderConfig, period: int, local_rope: Rope | None = None, *, width: int = 4096
) -> DecoderConfig:
    """Return the decoder with its layers' windows.

    Without ``layer_types``, the last of every ``period`` layers attends to the whole sequence. ``local_rope`` are the
    other layers' rotary positions, None if they are the same; ``width`` is the default of their windows.
    """
    window, slides = read_window(reader, default=width), read_layer_types(reader, decoder.num_layers)
    if slides is None:
        slides = tuple((layer + 1) % period != 0 for layer in range(decoder.num_layers))
    if any(slides) and window is None:
        raise reader.refuse(
            "sliding_window", None, "write the window's width, or layer_types without sliding_attention"
        )
    (whole,) = decoder.layer_pattern
    windowed = LayerKind(local_rope or whole.rope, window)
    return replace(decoder, layer_pattern=shortest_pattern(tuple(windowed if one else whole for one in slides)))
