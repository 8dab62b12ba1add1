"""Sums over positions in pieces: the logits of all positions would not fit into memory, or take long to read again."""

from collections.abc import Callable
from functools import partial
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


def loss_by_pieces(
    function: Callable[..., tuple[Any, Any]],
    learned: Any,
    states: Any,
    whole: Any,
    along: Any,
    count: Any,
    at_once: int,
) -> tuple[Any, Any]:
    """Return a loss over the first ``count`` positions and what it tells, with gradients from the same pass.

    ``function(learned, states, whole, along)`` gives the loss of a piece, a sum, and further sums, which have no
    gradient. Of ``states`` and ``along``, arrays ``[B, T, ...]``, it gets a piece of the second axis, with about
    ``at_once`` positions of all rows together; ``learned`` and ``whole`` are not cut. Gradients go to ``learned`` and
    ``states``. The last piece may end past ``count``, padded with zeros, so one of ``along`` is to be a mask. No
    piece's logits are kept, or computed again. ``function`` must be hashable and hold no arrays. On a mesh, a device's
    gradients of ``learned`` are added to the others' once a piece.
    """
    batch, num_tokens = jax.tree.leaves(states)[0].shape[:2]
    size = min(num_tokens, max(1, at_once // batch))
    padding = -num_tokens % size

    def pad(array: Any) -> Any:
        array = jnp.asarray(array)
        return jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))

    states, along = jax.tree.map(pad, (states, along))
    return _loss_by_pieces(function, size, learned, states, whole, along, (count + size - 1) // size)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_by_pieces(
    function: Callable[..., Any], size: int, learned: Any, states: Any, whole: Any, along: Any, num_pieces: Any
) -> tuple[Any, Any]:
    return _loss_and_gradients(function, size, learned, states, whole, along, num_pieces)[0]


def _loss_and_gradients(
    function: Callable[..., Any], size: int, learned: Any, states: Any, whole: Any, along: Any, num_pieces: Any
) -> tuple[Any, Any]:
    derive = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)

    def piece(at: Any) -> Any:
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=at * size, slice_size=size, axis=1)
        return derive(learned, jax.tree.map(cut, states), whole, jax.tree.map(cut, along))

    def add_piece(at: Any, sums: Any) -> Any:
        values, of_learned, of_states = sums
        new_values, (new_of_learned, new_of_states) = piece(at)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at * size, axis=1)
        values, of_learned = jax.tree.map(
            lambda total, new: total + new.astype(total.dtype), (values, of_learned), (new_values, new_of_learned)
        )
        return values, of_learned, jax.tree.map(put, of_states, new_of_states)

    shapes, (learned_shapes, _) = jax.eval_shape(piece, jnp.int32(0))
    values = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    # Not narrower than float32, whatever the parameters are: sums of many small parts.
    of_learned = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), learned_shapes
    )
    sums = values, of_learned, jax.tree.map(jnp.zeros_like, states)
    values, of_learned, of_states = jax.lax.fori_loop(0, num_pieces, add_piece, sums)
    of_learned = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), of_learned, learned_shapes)
    return values, (of_learned, of_states)


def _scaled_gradients(function: Callable[..., Any], size: int, gradients: Any, of_values: Any) -> tuple[Any, ...]:
    of_loss, _ = of_values
    scaled = jax.tree.map(lambda leaf: (leaf * of_loss).astype(leaf.dtype), gradients)
    return *scaled, None, None, None


_loss_by_pieces.defvjp(_loss_and_gradients, _scaled_gradients)
