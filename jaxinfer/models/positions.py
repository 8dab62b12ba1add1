"""Rotary positions (Su et al., 2104.09864), at any place in a text of any length."""

import jax.numpy as jnp

from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.rope_frequencies import long_frequencies, static_frequencies
from jaxinfer.notation import Array, Float, Int


def rotary_tables(
    rope: Rope, positions_BT: Int[Array, "B T"], context_lengths_B: Int[Array, " B"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines (R = half of the rotated lanes) for tokens at ``positions_BT``.

    ``context_lengths_B`` is the length of text that each row was prefilled with. Under ``dynamic`` and ``longrope``
    scaling that text is rotated for its whole length and every later token for the length it brings the text to: what
    Hugging Face does when a prompt is prefilled at once, but a function of the row alone, however its tokens are
    grouped into forward passes. Decoding prefills anew where ``longrope`` would mix its two sets of factors.
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


def rotate(
    heads_BTNH: Float[Array, "B T N H"], cosines_BTR: Float[Array, "B T R"], sines_BTR: Float[Array, "B T R"]
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + R) of a head's first 2R lanes, computing in the tables' dtype; the rest stays."""
    half = cosines_BTR.shape[-1]
    wide = heads_BTNH.astype(cosines_BTR.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cosines, sines = cosines_BTR[:, :, None], sines_BTR[:, :, None]
    parts = [first * cosines - second * sines, second * cosines + first * sines, rest]
    rotated = jnp.concatenate(parts if rest.shape[-1] else parts[:2], axis=-1)
    return rotated.astype(heads_BTNH.dtype)


def _dynamic_frequencies(rope: Rope, scaling: RopeScaling, lengths_BT: Float[Array, "B T"]) -> Float[Array, "B T R"]:
    dim = rope.dim
    stretch = jnp.maximum(lengths_BT / scaling.original_max_position, 1.0)
    base_BT = rope.theta * (scaling.factor * stretch - (scaling.factor - 1)) ** (dim / (dim - 2))
    exponents = jnp.arange(0, dim, 2, dtype=lengths_BT.dtype) / dim
    return base_BT[..., None] ** -exponents
