"""Rotary positions (Su et al., 2104.09864) and sinusoids, for any position of sequences of any length."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.models.config import Rope, RopeScaling, Sharpening
from jaxinfer.models.rope_frequencies import long_frequencies, static_frequencies
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.rounding import rounded


def rotary_tables(
    rope: Rope, positions_BT: Int[Array, "B T"], context_lengths_B: Int[Array, " B"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines (R = half of the rotated lanes) for tokens at ``positions_BT``.

    ``context_lengths_B`` is the number of tokens that each row was prefilled with. With ``dynamic`` and ``longrope``
    scaling, these tokens are rotated for that length, and every later token for the sequence's length up to that token.
    Hugging Face does the same if a prompt is prefilled at once. Here the result depends only on the row, not on how its
    tokens are grouped into forward passes. Decoding prefills again if ``longrope`` would mix its two sets of factors.
    """
    scaling = rope.scaling
    wide = jnp.promote_types(dtype, jnp.float32)
    static, attention_factor = static_frequencies(rope)
    frequencies = jnp.asarray(static, wide)[None, None]
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        lengths_BT = jnp.maximum(positions_BT + 1, context_lengths_B[:, None])
        if scaling.kind == "dynamic":
            frequencies = _dynamic_frequencies(rope, scaling, lengths_BT.astype(wide))
        else:
            is_long_BT1 = (lengths_BT > scaling.original_max_position)[..., None]
            frequencies = jnp.where(is_long_BT1, jnp.asarray(long_frequencies(rope), wide), frequencies)
    angles_BTR = positions_BT[..., None].astype(wide) * frequencies
    return jnp.cos(angles_BTR) * attention_factor, jnp.sin(angles_BTR) * attention_factor


def _dynamic_frequencies(rope: Rope, scaling: RopeScaling, lengths_BT: Float[Array, "B T"]) -> Float[Array, "B T R"]:
    dim = rope.dim
    stretch = jnp.maximum(lengths_BT / scaling.original_max_position, 1.0)
    base_BT = rope.theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=lengths_BT.dtype) / dim
    return base_BT[..., None] ** -exponents


def unbounded_tables(
    rope: Rope, positions_BT: Int[Array, "B T"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines for any positions, with the frequencies of sequences up to the original training length.

    In float32, the product of a position and a frequency is off by 0.03 radians at a million tokens. Here integers
    remove whole turns first, so all positions are equally exact. The attention factor is not applied.
    """
    frequencies, _ = static_frequencies(rope)
    wide = jnp.promote_types(dtype, jnp.float32)
    if wide == jnp.float64:
        angles_BTR = positions_BT[..., None] * jnp.asarray(frequencies, wide)
    else:
        turns = frequencies / (2 * math.pi)
        words = np.round(turns * 2.0**32).astype(np.uint32)
        rest = (turns - words / 2.0**32).astype(np.float32)
        # The product wraps around at 2**32, which is one turn.
        wrapped_BTR = lax.bitcast_convert_type(positions_BT[..., None].astype(jnp.uint32) * words, jnp.int32)
        exact_BTR = wrapped_BTR.astype(wide) * np.float32(2.0**-32) + positions_BT[..., None].astype(wide) * rest
        angles_BTR = exact_BTR * np.float32(2 * math.pi)
    return jnp.cos(angles_BTR), jnp.sin(angles_BTR)


def sinusoids(positions_BT: Int[Array, "B T"], width: int, dtype: jnp.dtype) -> Float[Array, "B T D"]:
    """Return sines of a position times falling frequencies, then cosines; the last frequency is 1 / 10000."""
    frequencies_R = 10000.0 ** -(np.arange(width // 2) / (width // 2 - 1))
    wide = jnp.promote_types(dtype, jnp.float32)
    angles_BTR = rounded(positions_BT[..., None].astype(wide) * jnp.asarray(frequencies_R, wide))
    return jnp.concatenate([jnp.sin(angles_BTR), jnp.cos(angles_BTR)], axis=-1).astype(dtype)


def sharpened(sharpening: Sharpening, positions_BT: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T"]:
    """Return what the queries of tokens at ``positions_BT`` are multiplied by."""
    count_BT = ((positions_BT + sharpening.ahead) // sharpening.interval).astype(jnp.promote_types(dtype, jnp.float32))
    # Rounded before the sum, so that a token's scale does not depend on how many are computed with it.
    return (1 + rounded(sharpening.strength * jnp.log1p(count_BT))).astype(dtype)
