"""Rotary positions and the ways of stretching them (Su et al., 2104.09864; variants in `RopeScaling`)."""

import math

import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import DecoderConfig, RopeScaling
from jaxinfer.notation import Array, Float, Int


def rotary_tables(
    config: DecoderConfig, positions_BT: Int[Array, "B T"], context_lengths_B: Int[Array, " B"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines (R = H / 2) for tokens at ``positions_BT``.

    ``context_lengths_B`` is each row's prompt length. Under ``dynamic`` scaling a prompt is rotated for its whole
    length and every later token for the length it brings the text to: what Hugging Face does when a prompt is
    prefilled at once, but a function of the row alone, however its tokens are grouped into forward passes.
    """
    scaling = config.rope_scaling
    wide = jnp.promote_types(dtype, jnp.float32)
    if scaling is not None and scaling.kind == "dynamic":
        lengths_BT = jnp.maximum(positions_BT + 1, context_lengths_B[:, None]).astype(wide)
        frequencies = _dynamic_frequencies(config, scaling, lengths_BT)
        attention_factor = 1.0
    else:
        static, attention_factor = static_frequencies(config)
        frequencies = jnp.asarray(static, wide)[None, None]
    angles_BTR = positions_BT[..., None].astype(wide) * frequencies
    return jnp.cos(angles_BTR) * attention_factor, jnp.sin(angles_BTR) * attention_factor


def rotate(
    heads_BTNH: Float[Array, "B T N H"], cosines_BTR: Float[Array, "B T R"], sines_BTR: Float[Array, "B T R"]
) -> Float[Array, "B T N H"]:
    """Rotate each pair (i, i + H/2) of a head's lanes, computing in the tables' dtype."""
    first, second = jnp.split(heads_BTNH.astype(cosines_BTR.dtype), 2, axis=-1)
    cosines, sines = cosines_BTR[:, :, None], sines_BTR[:, :, None]
    rotated = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return rotated.astype(heads_BTNH.dtype)


def static_frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
    """Return the rotary frequencies ``[H / 2]`` in radians a token, and what cosines and sines are multiplied by."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return _llama3_frequencies(plain, scaling), 1.0
        case "yarn":
            return _yarn_frequencies(plain, config, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def _dynamic_frequencies(
    config: DecoderConfig, scaling: RopeScaling, lengths_BT: Float[Array, "B T"]
) -> Float[Array, "B T R"]:
    dim = config.head_dim
    stretch = jnp.maximum(lengths_BT / scaling.original_max_position, 1.0)
    base_BT = config.rope_theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=lengths_BT.dtype) / dim
    return base_BT[..., None] ** -exponents


def _llama3_frequencies(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    return np.where(wavelengths > longest, plain / scaling.factor, np.where(wavelengths < shortest, plain, blended))


def _yarn_frequencies(plain: np.ndarray, config: DecoderConfig, scaling: RopeScaling) -> np.ndarray:
    dim = config.head_dim

    def lane_of(rotations: float) -> float:
        lanes = dim * math.log(scaling.original_max_position / (rotations * 2 * math.pi))
        return lanes / (2 * math.log(config.rope_theta))

    low, high = lane_of(scaling.beta_fast), lane_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Kept as published implementations have it: a range of no width would divide by zero.
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
