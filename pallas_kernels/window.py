"""How far back a query attends: the last so many positions, or those since the last multiple of a number."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Chunk:
    """A window that does not slide: it begins anew at every multiple of ``size`` (Llama 4's chunked attention).

    It is part of the sliding window of ``size`` positions, so whatever holds enough for that one holds enough for it.
    """

    size: int


# The positions of a sliding window, the query's own included, or a chunk.
Window = int | Chunk


def widest(window: Window) -> int:
    """Return how many positions a query attends to at most, its own included."""
    return window.size if isinstance(window, Chunk) else window


def oldest(window: Window, position: Any) -> Any:
    """Return the oldest position that a query at ``position`` attends to; negative ones do not exist."""
    if isinstance(window, Chunk):
        return position - lax.rem(position, jnp.full_like(position, window.size))
    return position - (window - 1)
