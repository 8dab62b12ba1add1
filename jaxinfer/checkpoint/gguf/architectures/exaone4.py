"""Architecture exaone4: norms after each part, and windows in the layers that rotate, if any layer has one."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.gemma2 import read_layer_types
from jaxinfer.checkpoint.gguf.architectures.llama import TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import read_relative
from jaxinfer.checkpoint.gguf.architectures.olmo2 import OLMO2
from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_PERIOD = 4


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "exaone4", "Exaone4ForCausalLM")
    if config.pop("attention_bias"):
        raise reader.refuse("block_count", "queries have biases, which no EXAONE 4 has")
    window = reader.optional_int("attention.sliding_window")
    if window is None:
        return {**config, "hidden_act": "silu", "sliding_window": None}
    types = read_layer_types(reader, config["num_hidden_layers"], _PERIOD)
    return {**config, "hidden_act": "silu", "sliding_window": window, "layer_types": types}


EXAONE4 = Architecture("exaone4", _translate, TOP, MappingProxyType(dict(OLMO2.block)))
