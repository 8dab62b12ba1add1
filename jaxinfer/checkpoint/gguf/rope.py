"""Recovers the rotary scaling of a llama GGUF file; llama.cpp writes it as keys or only as a tensor of divisors."""

import itertools
import math
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.errors import UnsupportedModel

# Llama 3.1 and later use these; llama.cpp's converter drops them and keeps the divisors computed from them.
_LOW_FREQ_FACTOR = 1.0
# Llama 4 Scout's is the low one: its frequencies are scaled or not, and none in between.
_HIGH_FREQ_FACTORS = (4.0, 1.0)
_PUBLISHED_FACTORS = (8.0, 32.0)
_ORIGINAL_LENGTHS = (8192, *(2**power for power in range(5, 21) if power != 13))
# The converter computes in float32: the error of a smoothing weight, about 2e-7, grows by up to the factor of 32.
_TOLERANCE = 1e-5


def read_rope_scaling(
    reader: MetadataReader, factors: np.ndarray | None, theta: float, head_dim: int, max_position: int
) -> dict[str, Any] | None:
    """Return Hugging Face's ``rope_scaling``; ``factors`` [H / 2] are the file's frequency divisors, if any."""
    stated = _read_keys(reader, max_position)
    baked = None if factors is None else _recover_llama3(reader.origin, factors, theta, head_dim)
    if stated and baked:
        raise reader.refuse("rope.scaling.type", "the tensor rope_freqs.weight scales the frequencies too")
    return baked or stated


def _read_keys(reader: MetadataReader, max_position: int) -> dict[str, Any] | None:
    kind = reader.word("rope.scaling.type", default="linear")
    if kind not in ("none", "linear", "yarn"):
        raise reader.refuse("rope.scaling.type", "known values are none, linear, yarn")
    key = "rope.scaling.factor" if reader.has("rope.scaling.factor") else "rope.scale_linear"
    factor = reader.positive_float(key, default=1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        if kind == "none":  # where the base is stretched instead, the file says from which length
            reader.optional_int("rope.scaling.original_context_length")
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.positive_int(
            "rope.scaling.original_context_length", default=max_position
        ),
        "beta_fast": reader.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": reader.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
    }


def _recover_llama3(origin: str, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the llama3 scaling that gives these divisors; None if all are 1."""
    if factors.shape == (head_dim // 2,) and np.all(np.isfinite(factors)) and np.all(factors >= 1):
        if np.all(factors == 1):
            return None
        # If several lengths give the same divisors, they also give the same network.
        tried = (float(str(np.max(factors))), *_PUBLISHED_FACTORS)
        for high, original, factor in itertools.product(_HIGH_FREQ_FACTORS, _ORIGINAL_LENGTHS, tried):
            found = llama3_factors(factor, original, theta, head_dim, high)
            if np.allclose(factors, found, rtol=_TOLERANCE, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LOW_FREQ_FACTOR,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise UnsupportedModel(
        f"{origin}: the tensor rope_freqs.weight is not the llama3 scaling of any known length; "
        "use the model's Hugging Face folder"
    )


def llama3_factors(factor: float, original: int, theta: float, head_dim: int, high: float) -> np.ndarray:
    """Compute llama3 scaling's divisors of the rotary frequencies, [H / 2] in float64.

    ``original`` is in tokens, and ``high`` the high_freq_factor.
    """
    frequencies = np.float64(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original * frequencies / (2 * math.pi)
    if high == _LOW_FREQ_FACTOR:
        return np.where(turns < high, factor, 1.0)
    smooth = np.clip((turns - _LOW_FREQ_FACTOR) / (high - _LOW_FREQ_FACTOR), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
