"""What take_columns computes, in plain jax.numpy."""

from collections.abc import Sequence

import jax


def reference_columns(parts: Sequence[jax.Array], columns_T: jax.Array) -> list[jax.Array]:
    """Return the columns of each part ``[K, V]`` as rows ``[T, K]``."""
    return [part.T[columns_T] for part in parts]
