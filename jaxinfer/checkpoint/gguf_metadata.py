"""Typed access to the metadata of a GGUF file, which refuses by name whatever may change the network unread."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf_header import quote
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

# Keys below "llama." that the translation reads, or that leave the network as it is.
_KNOWN = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "tensor_data_layout",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)

# Keys that mean nothing at these values and another network at any other.
_NEUTRAL: Mapping[str, float] = MappingProxyType(
    {
        "expert_count": 0,
        "expert_used_count": 0,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "attention.causal": True,
        "attention.sliding_window": 0,
        "attention.clamp_kqv": 0.0,
        "attention.max_alibi_bias": 0.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
)


class MetadataReader:
    """One architecture's keys in a GGUF's metadata; errors name the file and the key."""

    def __init__(self, origin: str, metadata: Mapping[str, Any], architecture: str):
        self.origin = origin
        self.metadata = metadata
        self._prefix = f"{architecture}."

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Read an integer above 0; without a default the key must be there."""
        value = self.metadata.get(self._prefix + key, default)
        if value is None:
            raise InvalidCheckpoint(f"{self.origin}: metadata key {self._prefix}{key} is missing; convert it again")
        # bool is an int to Python.
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.refuse(key, "it must be one positive integer, the same for all layers")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0, as the shortest decimal that has the same float32 value."""
        value = self.metadata.get(self._prefix + key, default)
        if value is None:
            raise InvalidCheckpoint(f"{self.origin}: metadata key {self._prefix}{key} is missing; convert it again")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(key, "it must be a positive number")
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if single == value else float(value)

    def word(self, key: str, default: str) -> str:
        """Read a string."""
        value = self.metadata.get(self._prefix + key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "it must be a string")
        return value

    def has(self, key: str) -> bool:
        """Tell whether the key is there."""
        return self._prefix + key in self.metadata

    def refuse(self, key: str, why: str) -> UnsupportedModel:
        """Return the error, to be raised, that names a key, its value and the reason."""
        value = self.metadata.get(self._prefix + key)
        return UnsupportedModel(f"{self.origin}: {self._prefix}{key} = {quote(value)} is not supported: {why}")

    def refuse_unknown(self) -> None:
        """Refuse every key of the architecture that may change the network and that nothing reads."""
        for name, value in self.metadata.items():
            key = name.removeprefix(self._prefix)
            if key == name or key in _KNOWN or (key in _NEUTRAL and value == _NEUTRAL[key]):
                continue
            shown = quote(name)[1:-1]
            raise UnsupportedModel(
                f"{self.origin}: {shown} = {quote(value)} is not implemented by the decoder; "
                "use a conversion of a plain llama model"
            )
