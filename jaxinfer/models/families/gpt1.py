"""GPT-1: GPT-2 with norms after each sum, and no last one."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gpt2
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader

_USUAL = MappingProxyType({"vocab_size": 40478, "n_positions": 512, "bos_token_id": None, "eos_token_id": None})
# Both are the approximation by a hyperbolic tangent there.
_ACTIVATIONS = MappingProxyType(
    {"gelu": "gelu_new", "gelu_new": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` openai-gpt."""
    words = {**_USUAL, **config}
    function = words.pop("afn", "gelu")
    if not isinstance(function, str) or function not in _ACTIVATIONS:
        raise ConfigReader(config, "openai-gpt").refuse("afn", function, f"known values are {', '.join(_ACTIVATIONS)}")
    reader = ConfigReader({**words, "activation_function": _ACTIVATIONS[function]}, family="openai-gpt")
    if reader.has("n_inner"):
        raise reader.refuse("n_inner", config["n_inner"], "the feed-forward part is four times as wide as the model")
    decoder = gpt2.read_gpt2_keys(reader, "openai-gpt")
    return reader.finish(replace(decoder, block="post_norm", final_norm=False))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: GPT-2's, but for the tables."""
    names = gpt2.tensor_names(config)
    top = {path: source for path, source in names.top.items() if not path.startswith("final_norm")}
    top |= {
        "embed.embedding": "transformer.tokens_embed.weight",
        "positions.embedding": "transformer.positions_embed.weight",
    }
    return replace(names, top=top)


GPT1 = Family("openai-gpt", ("OpenAIGPTLMHeadModel",), translate, tensor_names)
