"""Computing once what is used in many places."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend


def computed_once(values: Any, lengths_B: Int[Array, " B"], backend: Backend) -> Any:
    """Return arrays as they are, which the compiler is kept from computing anew wherever they are used.

    XLA's CPU backend merges what makes an array into each of its uses, cosines into every layer, and drops barriers
    before it does. It leaves the results of a condition alone; this one's outcome, that no row has a negative length,
    it cannot know.
    """
    if backend.platform != "cpu":
        return values
    return jax.lax.cond(jnp.all(lengths_B >= 0), lambda: values, lambda: jax.tree.map(jnp.zeros_like, values))
