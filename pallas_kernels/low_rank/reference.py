"""The references of low_rank, in plain JAX: each row's matrix is gathered."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def reference_down(
    x_BTI: jax.Array, stacks: Sequence[jax.Array], ids_B: jax.Array, *, first: Any = 0, **_: Any
) -> list[jax.Array]:
    """Return ``stack[first + id] @ x`` of each row for each stack; zeros for rows of a negative id."""
    return [_product(x_BTI, stack_XRI[first + jnp.maximum(ids_B, 0)], ids_B) for stack_XRI in stacks]


def reference_up(
    base_BTO: jax.Array, inner_BTR: jax.Array, up_XRO: jax.Array, ids_B: jax.Array, *, first: Any = 0, **_: Any
) -> jax.Array:
    """Return the base plus ``inner @ up[first + id]`` of each row; rows of a negative id stay as they are."""
    up_BOR = up_XRO[first + jnp.maximum(ids_B, 0)].swapaxes(1, 2)
    added_BTO = _product(inner_BTR.astype(up_XRO.dtype), up_BOR, ids_B)
    return (base_BTO.astype(jnp.float32) + added_BTO).astype(base_BTO.dtype)


def _product(x_BTI: jax.Array, matrix_BRI: jax.Array, ids_B: jax.Array) -> jax.Array:
    matrix, x = (each.astype(jnp.float32) for each in (matrix_BRI, x_BTI))
    found_BTR = jnp.einsum("bri,bti->btr", matrix, x, precision=lax.Precision.HIGHEST)
    return jnp.where(ids_B[:, None, None] < 0, 0, found_BTR)
