"""Architecture apertus: norms of heads, and xIELU, whose parameters are lists among the metadata."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import read_relative
from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.errors import InvalidCheckpoint

# The shape that each has in the model's folder.
_SHAPES: Mapping[str, tuple[int, ...]] = MappingProxyType({"alpha_p": (1,), "alpha_n": (1,), "beta": ()})


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "apertus", "ApertusForCausalLM")
    if config["rope_scaling"] is None:  # an absent section would stand for the published models'
        config["rope_scaling"] = {"rope_type": "default"}
    return {**config, "hidden_act": "xielu"}


def _activations(reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the parameters of each layer's activation as tensors."""
    made, count = {}, config["num_hidden_layers"]
    for name, shape in _SHAPES.items():
        key = f"xielu.{name}"
        values = reader.metadata.get(key)
        values = values if isinstance(values, list) else [values] * count
        if len(values) != count or not all(type(one) in (int, float) and math.isfinite(one) for one in values):
            raise InvalidCheckpoint(f"{reader.origin}: {key} must hold {count} numbers; convert the model again")
        for layer, value in enumerate(values):
            made[f"model.layers.{layer}.mlp.act_fn.{name}"] = np.full(shape, value, np.float32)
    return made


_PARTS = {part: name for part, name in BLOCK.items() if part != "ffn_gate"}
_NORMS = {
    "attn_norm": "attention_layernorm",
    "ffn_norm": "feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
APERTUS = Architecture("apertus", _translate, TOP, MappingProxyType({**_PARTS, **_NORMS}), arrays=_activations)
