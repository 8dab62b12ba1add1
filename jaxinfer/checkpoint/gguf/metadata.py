"""Typed access to a GGUF file's metadata; raises an error for unread keys that may change the network."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.header import quote
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

# Keys of an architecture that never change the network.
_SILENT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# Keys of an image tower, which is not part of the text decoder; its tensors would be refused.
_SILENT_PREFIXES = ("vision.", "mm.")

# Keys that have no effect at these values. At any other value, an unread key means another network.
_NEUTRAL: Mapping[str, float] = MappingProxyType(
    {
        "expert_count": 0,
        "expert_used_count": 0,
        "pooling_type": 0,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": 0.0,
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
        self._architecture = architecture
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def positive_int(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Read an integer in ``1..most``; without a default the key is required."""
        value = self._value(key, default)
        # bool is a subclass of int.
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(key, f"it must be one integer from 1 to {most}, the same for all layers")
        return value

    def optional_int(self, key: str) -> int | None:
        """Read an integer above 0; None if it is absent or 0."""
        value = self._value(key, 0)
        return None if type(value) is int and value == 0 else self.positive_int(key)

    def positive_float(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0 as the shortest decimal with the same float32 value."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(key, "it must be a positive number")
        return shortest_decimal(float(value))

    def optional_float(self, key: str) -> float | None:
        """Read a finite number above 0; None if it is absent or 0."""
        value = self._value(key, 0.0)
        return None if type(value) in (int, float) and value == 0 else self.positive_float(key)

    def boolean(self, key: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def word(self, key: str, default: str) -> str:
        """Read a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "it must be a string")
        return value

    def flags(self, key: str, count: int) -> tuple[bool, ...] | None:
        """Read a list of as many booleans; None if it is absent, or not a list."""
        value = self._value(key, ()) if self.has(key) else ()
        if not isinstance(value, list):
            return None
        if len(value) != count or not all(isinstance(each, bool) for each in value):
            raise self.refuse(key, f"it must be one number, or a list of {count} times true or false")
        return tuple(value)

    def alike(self, key: str, count: int, default: int | None = None) -> int:
        """Read an integer above 0 that all layers share, be it written once or as a list of ``count``."""
        value = self._value(key, default)
        if not isinstance(value, list):
            return self.positive_int(key, default)
        if len(value) != count or any(type(one) is not int or not 1 <= one == value[0] < 2**31 for one in value):
            raise self.refuse(key, f"it must be one integer above 0, the same for all {count} layers")
        return value[0]

    def skip(self, *keys: str) -> None:
        """Count keys as read whose values, whatever they are, leave the network alone."""
        self._read.update(keys)

    def has(self, key: str) -> bool:
        """Tell whether the key exists; this does not count as reading it."""
        return self._prefix + key in self.metadata

    def refuse(self, key: str, why: str) -> UnsupportedModel:
        """Return an error, for the caller to raise, that names a key, its value and the reason."""
        value = self.metadata.get(self._prefix + key)
        return UnsupportedModel(f"{self.origin}: {self._prefix}{key} = {quote(value)} is not supported: {why}")

    def finish(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return ``config`` if every key of the architecture was read or is known to change nothing."""
        for name, value in self.metadata.items():
            key = name.removeprefix(self._prefix)
            if key == name or key in self._read or key in _SILENT or key.startswith(_SILENT_PREFIXES):
                continue
            if key not in _NEUTRAL or value != _NEUTRAL[key]:
                shown = quote(name)[1:-1]
                raise UnsupportedModel(
                    f"{self.origin}: {shown} = {quote(value)} is not implemented by the decoder; "
                    f"use a conversion of a plain {self._architecture} model"
                )
        return config

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.metadata.get(self._prefix + key, default)
        if value is None:
            raise InvalidCheckpoint(f"{self.origin}: metadata key {self._prefix}{key} is missing; convert it again")
        return value


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal with the same float32 value, or the number itself if it is not a float32 value."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    return float(str(single)) if single == value else value
