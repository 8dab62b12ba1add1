"""Keeps the compiler from computing or copying again what is there already."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend

# The lanes of a TPU's tile.
_LANES = 128


def computed_once(values: Any, lengths_B: Int[Array, " B"], backend: Backend) -> Any:
    """Return the same arrays, but keep the compiler from computing them again at every use.

    XLA's CPU backend fuses an array's computation into each of its uses, for example cosines into every layer, and
    drops barriers before that. It does not fuse the results of a condition. The compiler cannot know this condition's
    outcome: that no row has a negative length.
    """
    if backend.platform != "cpu":
        return values
    return jax.lax.cond(jnp.all(lengths_B >= 0), lambda: values, lambda: jax.tree.map(jnp.zeros_like, values))


def apart_from_product(flat: Float[Array, "B T F"], head_dim: int, backend: Backend) -> Float[Array, "B T F"]:
    """Return a product's rows so that the compiler splits them into heads, and not the kernel that they come from.

    On a TPU it would copy a layer's kernel in order to split it into heads that are no whole tiles.
    """
    is_copied = backend.platform == "tpu" and head_dim % _LANES
    return jax.lax.optimization_barrier(flat) if is_copied else flat
