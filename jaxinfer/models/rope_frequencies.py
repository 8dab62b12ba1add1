"""The frequencies of rotary positions, for each kind of scaling (`RopeScaling`)."""

import math

import numpy as np

from jaxinfer.models.config import Rope, RopeScaling


def static_frequencies(rope: Rope) -> tuple[np.ndarray, float]:
    """Return the frequencies ``[dim / 2]`` in radians per token, and the factor of cosines and sines.

    They hold for any sequence; with ``dynamic`` and ``longrope``, only up to the original length.
    """
    plain = _plain_frequencies(rope)
    scaling = rope.scaling
    if scaling is None:
        return plain, 1.0
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return _llama3_frequencies(plain, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(plain, rope, scaling), _yarn_attention_factor(scaling)
        case "longrope":
            return plain / np.asarray(scaling.short_factors), _longrope_attention_factor(scaling)
    return plain, 1.0


def long_frequencies(rope: Rope) -> np.ndarray:
    """Return the frequencies of ``longrope`` scaling for sequences past the original length."""
    assert rope.scaling is not None
    return _plain_frequencies(rope) / np.asarray(rope.scaling.long_factors)


def angles_are_finite(rope: Rope, num_positions: int) -> bool:
    """Tell whether the angles of the first positions can be computed in float32 and are finite."""
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "dynamic" and rope.dim == 2:  # its base grows by a power of dim - 2
        return False
    try:
        with np.errstate(all="ignore"):
            frequencies, attention_factor = static_frequencies(rope)
            longest = long_frequencies(rope) if scaling is not None and scaling.long_factors else frequencies
            numbers = [*frequencies * num_positions, *longest * num_positions, attention_factor]
            return bool(np.isfinite(np.array([*numbers, scaling.factor if scaling else 1.0], np.float32)).all())
    except (ArithmeticError, ValueError):  # a division by zero or its logarithm
        return False


def _plain_frequencies(rope: Rope) -> np.ndarray:
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    return rope.theta**-exponents


def _llama3_frequencies(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    if longest == shortest:  # a step, with nothing to blend
        return np.where(wavelengths <= longest, plain, plain / scaling.factor)
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    return np.where(wavelengths > longest, plain / scaling.factor, np.where(wavelengths < shortest, plain, blended))


def _yarn_frequencies(plain: np.ndarray, rope: Rope, scaling: RopeScaling) -> np.ndarray:
    dim = rope.dim

    def lane_of(rotations: float) -> float:
        lanes = dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi))
        return lanes / (2 * math.log(rope.theta))

    low, high = lane_of(scaling.beta_fast), lane_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # As in published implementations: an empty range would divide by zero.
    high = high + 0.001 if low == high else high
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))
