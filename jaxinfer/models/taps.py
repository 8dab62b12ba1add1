"""Intermediate results of a forward pass, by module and name.

Modules `tap` what they compute. A pass that does not ask for taps drops them while it is traced, so its program is the
same as without.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

# Linen's collection of them.
TAPS = "taps"


def tap(module: nn.Module, name: str, value: jax.Array) -> jax.Array:
    """Keep a result under the module's path and a name that no parameter or part of the module has; return it."""
    module.sow(TAPS, name, value)
    return value


def tapped(collection: Mapping[str, Any], *path: str) -> Iterator[tuple[str, jax.Array]]:
    """Return the paths and results in Linen's collection, in the order in which they were computed."""
    for name, value in collection.items():
        if isinstance(value, Mapping):
            yield from tapped(value, *path, name)
        else:
            # Linen keeps a tuple of all results with this name.
            yield ".".join((*path, name)), value[-1]
