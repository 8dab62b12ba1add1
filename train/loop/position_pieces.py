"""Sums over positions in pieces, if the logits of all positions do not fit into memory at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Rows times positions of one piece: with 49,152 logits each, in float32, this is 200 MB.
_AT_ONCE = 1024


def sum_by_pieces(function: Callable[..., Any], *arrays: Any, at_once: int = _AT_ONCE) -> Any:
    """Return the sum of ``function`` over pieces of the second axis, T, of arrays ``[B, T, ...]``.

    Arrays are padded with zeros, so one of them must be a mask. A backward pass recomputes each piece.
    """
    batch, num_tokens = jax.tree.leaves(arrays)[0].shape[:2]
    count = -(-num_tokens // max(1, at_once // batch))
    size = -(-num_tokens // count)
    function = jax.checkpoint(function, prevent_cse=count == 1)
    if count == 1:
        return function(*arrays)

    def cut(array: Any) -> Any:
        array = jnp.asarray(array)
        padding = [(0, 0), (0, count * size - num_tokens)] + [(0, 0)] * (array.ndim - 2)
        return jnp.pad(array, padding).reshape(batch, count, size, *array.shape[2:]).swapaxes(0, 1)

    def add(sums: Any, piece: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, function(*piece)), None

    pieces = jax.tree.map(cut, arrays)
    shapes = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], pieces))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums, _ = jax.lax.scan(add, zeros, pieces)
    return sums
