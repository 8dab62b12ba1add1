"""Makes the compiler compute arrays once that are used in many places."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend


def computed_once(values: Any, lengths_B: Int[Array, " B"], backend: Backend) -> Any:
    """Return the same arrays, but keep the compiler from computing them again at every use.

    XLA's CPU backend fuses an array's computation into each of its uses, for example cosines into every layer, and
    drops barriers before that. It does not fuse the results of a condition. The compiler cannot know this condition's
    outcome: that no row has a negative length.
    """
    if backend.platform != "cpu":
        return values
    return jax.lax.cond(jnp.all(lengths_B >= 0), lambda: values, lambda: jax.tree.map(jnp.zeros_like, values))
