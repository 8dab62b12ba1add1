"""Keeps the compiler from computing or copying again what is there already."""

from collections.abc import Callable
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


def one_of(
    condition: Any, then: Callable[[Any], tuple[Any, Any]], otherwise: Callable[[Any], tuple[Any, Any]], held: Any
) -> tuple[Any, Any]:
    """Return ``then(held)`` where the condition is true, else ``otherwise(held)``: new ``held``, and results.

    Both return arrays of one shape. ``held`` is written in place: these are two loops of at most one iteration, since
    XLA's CPU backend copies what a branch of a condition writes to, twice, however large it is.
    """
    results = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(otherwise, held)[1])
    for is_chosen, branch in ((condition, then), (jnp.logical_not(condition), otherwise)):

        def iteration(carried: tuple[Any, Any, Any], branch: Any = branch) -> tuple[Any, Any, Any]:
            _, held, _ = carried
            return jnp.zeros((), bool), *branch(held)

        _, held, results = jax.lax.while_loop(lambda carried: carried[0], iteration, (is_chosen, held, results))
    return held, results
