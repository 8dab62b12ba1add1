"""SmolLM3: Llama without rotary positions in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.families.keys.windows import read_layer_types, read_rotating_layers, read_window

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` smollm3.

    ``no_rope_layers`` has a 0 for each layer without rotary positions. Layers without them have the window, if one is
    used and ``layer_types`` does not say otherwise.
    """
    reader = ConfigReader(config, family="smollm3")
    rope = partial(read_rope, theta=2e6)
    decoder = read_llama_keys(reader, "smollm3", _DEFAULTS, 128000, (128001,), tied=True, rope=rope)
    attention_bias, mlp_bias = (reader.boolean(key, default=False) for key in ("attention_bias", "mlp_bias"))
    rotates = read_rotating_layers(reader, decoder.num_layers)
    width = read_window(reader, default=None)
    window = width if reader.boolean("use_sliding_window", default=False) else None
    slides = read_layer_types(reader, decoder.num_layers) or tuple(not one for one in rotates)
    (kind,) = decoder.layer_pattern
    layers = tuple(
        LayerKind(kind.rope if turns else None, window if is_sliding else None)
        for turns, is_sliding in zip(rotates, slides)
    )
    biases = {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": mlp_bias}
    return reader.finish(replace(decoder, layer_pattern=shortest_pattern(layers), **biases))


SMOLLM3 = Family("smollm3", ("SmolLM3ForCausalLM",), translate, tensor_names)
