"""Takes and puts rows of any pytree of a batch, such as a state or a strategy's memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int

# Of arrays that all rows share.
SHARED = -1


def row_axes(of_batch: Callable[[int], Any]) -> Any:
    """Return which axis of each array counts the rows, `SHARED` for none.

    ``of_batch`` describes the tree for a number of rows, as arrays or ``jax.ShapeDtypeStruct``. The axis is the one
    whose length is that number.
    """

    def axis(two: Any, three: Any) -> int:
        differing = [at for at, sizes in enumerate(zip(two.shape, three.shape)) if sizes[0] != sizes[1]]
        if not differing:
            return SHARED
        if len(differing) > 1 or (two.shape[differing[0]], three.shape[differing[0]]) != (2, 3):
            raise ValueError(f"arrays of {two.shape} for two rows and {three.shape} for three have no axis of rows")
        return differing[0]

    return jax.tree.map(axis, of_batch(2), of_batch(3))


def with_rows(tree: Any, axes: Any, count: int) -> Any:
    """Describe arrays like those of a tree, for another number of rows."""

    def resized(leaf: Any, axis: int) -> Any:
        sizes = (count if at == axis else size for at, size in enumerate(leaf.shape))
        return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

    return jax.tree.map(resized, tree, axes)


def take_batch(tree: Any, axes: Any, rows_B: Int[Array, " B"]) -> Any:
    """Return the given rows of every array."""
    return jax.tree.map(lambda leaf, axis: leaf if axis == SHARED else jnp.take(leaf, rows_B, axis=axis), tree, axes)


def put_batch(tree: Any, part: Any, axes: Any, rows_B: Int[Array, " B"]) -> Any:
    """Return the tree with the given rows replaced; of what all rows share, the part's is taken."""

    def put(leaf: Any, rows: Any, axis: int) -> Any:
        if axis == SHARED:
            return rows
        return leaf.at[(slice(None),) * axis + (rows_B,)].set(rows.astype(leaf.dtype), unique_indices=True)

    return jax.tree.map(put, tree, part, axes)


def num_rows(tree: Any, axes: Any) -> int:
    """Return how many rows a tree has."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(axes), strict=True)
    return next(leaf.shape[axis] for leaf, axis in leaves if axis != SHARED)
