"""EXAONE 4: norms after each part and of each head; with windows, the layers without one are not rotated."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.windows import read_layer_types, read_window
from jaxinfer.models.families.olmo import tensor_names

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` exaone4; a null window means none."""
    reader = ConfigReader(config, family="exaone4")
    decoder = read_llama_keys(reader, "exaone4", _DEFAULTS, 0, (2,), norm_eps=("rms_norm_eps", 1e-5))
    decoder = replace(decoder, block="output_norm", qk_norm="head")
    if read_window(reader, default=4096) is None:
        if any(read_layer_types(reader, decoder.num_layers) or ()):
            raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
        return reader.finish(decoder)
    # The first files say the pattern in letters, beside a list of the layers.
    period = 4 if reader.has("layer_types") else reader.positive_int("sliding_window_pattern", default=4)
    (kind,) = decoder.layer_pattern
    unrotated = replace(decoder, layer_pattern=(LayerKind(rope=None),))
    return reader.finish(read_window_layers(reader, unrotated, period, kind.rope))


EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM",), translate, tensor_names)
