"""Keeps products and sums apart, so that an element's bits do not depend on what the compiler computes together."""

import jax.numpy as jnp

from jaxinfer.notation import Array, Float


def rounded(products: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the same numbers, rounded before anything is added to them; infinite ones become the largest finite.

    XLA's CPU backend fuses operations, and LLVM then rounds a product and a sum together where the processor can. The
    backend drops barriers and changes of precision before that, but cannot drop a clip.
    """
    largest = jnp.finfo(products.dtype).max
    return jnp.clip(products, -largest, largest)


def scale_by(factor: float, values: Float[Array, "*shape"], platform: str) -> Float[Array, "*shape"]:
    """Return ``factor * values``, computed in float32 or wider and rounded before anything is added to it."""
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    products = (wide * jnp.asarray(factor, wide.dtype)).astype(values.dtype)
    return rounded(products) if platform == "cpu" else products
