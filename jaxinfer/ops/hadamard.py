"""The Hadamard transform of heads: sums and differences of all of a head's numbers.

Some of a key's numbers are far larger than the others. Rounded with one scale, the others would lose most of their
bits. After the transform all are about as large, and products of queries and keys are what they were (QuaRot, Ashkboos
et al., 2404.00456). SmolLM2-135M with int8 keys: perplexity +0.01% instead of +0.12%.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.notation import Array, Float


def even_out(
    query_BTNH: Float[Array, "B T N H"], keys_BTKH: Float[Array, "B T K H"], platform: str
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Return queries and keys with the same products, the keys' numbers about equally large."""
    return evened_query(query_BTNH, platform), transform(keys_BTKH, platform).astype(keys_BTKH.dtype)


def evened_query(query_BTNH: Float[Array, "B T N H"], platform: str) -> Float[Array, "B T N H"]:
    """Return queries for keys that `even_out` has changed; `transform` undoes it."""
    return (transform(query_BTNH, platform) / _size(query_BTNH.shape[-1])).astype(query_BTNH.dtype)


def transform(heads_BTNH: Float[Array, "B T N H"], platform: str) -> Float[Array, "B T N H"]:
    """Multiply heads by a Hadamard matrix, in float32 or wider; done twice it multiplies them by its size.

    Of a head whose width is no power of two, parts of the largest one that divides it are transformed.
    """
    size, shape = _size(heads_BTNH.shape[-1]), heads_BTNH.shape
    wide = heads_BTNH.astype(jnp.promote_types(heads_BTNH.dtype, jnp.float32))
    if size == 1:
        return wide
    if platform != "cpu":
        parts = wide.reshape(*shape[:-1], -1, size)
        return jnp.einsum("...h,hi->...i", parts, _matrix(size), precision=jax.lax.Precision.HIGHEST).reshape(shape)
    # Sums whose order does not depend on how many heads there are.
    width = 1
    while width < size:
        pairs = wide.reshape(*shape[:-1], -1, 2, width)
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        wide = jnp.stack([one + other, one - other], axis=-2)
        width *= 2
    return wide.reshape(shape)


def _size(head_dim: int) -> int:
    """Return the largest power of two that divides a head's width."""
    return head_dim & -head_dim


def _matrix(size: int) -> Any:
    rows = np.arange(size)
    signs = np.array([bin(number).count("1") % 2 for number in range(size)])
    return jnp.asarray(1.0 - 2.0 * signs[rows[:, None] & rows], jnp.float32)
