"""SmoothQuant: what is hard to round moves from the inputs of linear layers into their weights (2211.10438)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float

# How much of the inputs' sizes moves: alpha, by the paper the best for most models.
STRENGTH = 0.5
_LEAST_SIZE = 1e-5


@jax.jit
def smoothing_factors(kernels: Sequence[Float[Array, "_ K"]], most_K: Float[Array, " K"]) -> Float[Array, " K"]:
    """Return what the weights of each input are multiplied by, and the input divided by, of kernels that share inputs.

    Of input j that is ``max |x_j| ** alpha / max |w_j| ** (1 - alpha)``; ``most_K`` are the largest inputs seen.
    """
    weights_K = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(each.astype(jnp.float32)), axis=0) for each in kernels))
    inputs_K, weights_K = (jnp.maximum(each, _LEAST_SIZE) for each in (most_K, weights_K))
    return inputs_K**STRENGTH / weights_K ** (1 - STRENGTH)
