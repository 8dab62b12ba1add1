"""Rotates the lanes of heads by given angles (rotary positions: Su et al., 2104.09864)."""

import jax.numpy as jnp

from jaxinfer.notation import Array, Float


def rotate(
    heads_BTNH: Float[Array, "B T N H"], cosines_BTR: Float[Array, "B T R"], sines_BTR: Float[Array, "B T R"]
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (i, i + R) of a head's first 2R lanes, in the tables' dtype; the other lanes stay the same."""
    half = cosines_BTR.shape[-1]
    wide = heads_BTNH.astype(cosines_BTR.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cosines, sines = cosines_BTR[:, :, None], sines_BTR[:, :, None]
    parts = [first * cosines - second * sines, second * cosines + first * sines, rest]
    rotated = jnp.concatenate(parts if rest.shape[-1] else parts[:2], axis=-1)
    return rotated.astype(heads_BTNH.dtype)
