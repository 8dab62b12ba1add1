"""The bodies of `low_rank`: a block of rows by the matrices of several adapters, kept for the rows that have them.

The adapters' matrices are multiplied side by side: one of few ranks fills a few of the matrix unit's columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Body = Callable[..., None]


def down_body(together: int, num_stacks: int, precision: lax.Precision) -> Body:
    """Return the body of the products with the first matrix of each of several pairs."""

    def body(_first: Any, _rows: Any, _fetched: Any, met: Any, ids_ref: Any, x_ref: Any, *refs: Any) -> None:
        downs, outs = refs[: together * num_stacks], refs[together * num_stacks :]
        rows, numbers = x_ref[...], (((1,), (1,)), ((), ()))
        for index, out_ref in enumerate(outs):
            down = _joined(downs[index * together : (index + 1) * together])
            products = lax.dot_general(rows, down, numbers, precision=precision, preferred_element_type=jnp.float32)
            rank = out_ref.shape[1]
            # What rows of other adapters hold, at first anything, stays.
            found = out_ref[...]
            for place, is_own_M1 in enumerate(_owners(ids_ref, met, pl.program_id(0), together)):
                found = jnp.where(is_own_M1, products[:, place * rank : (place + 1) * rank], found)
            out_ref[...] = found

    return body


def up_body(together: int, precision: lax.Precision) -> Body:
    """Return the body of the products with the second matrix, which are added to the base."""

    def body(_first: Any, rows: Any, _fetched: Any, met: Any, ids_ref: Any, inner_ref: Any, *refs: Any) -> None:
        *ups, base_ref, out_ref = refs
        step = pl.program_id(1)

        @pl.when((step == 0) | (rows[step] != rows[jnp.maximum(step - 1, 0)]))
        def begin() -> None:
            out_ref[...] = base_ref[...]

        owners = _owners(ids_ref, met, step, together)
        inner, up = inner_ref[...], _joined(ups)
        masked = [jnp.where(is_own_M1, inner, 0.0) for is_own_M1 in owners]
        own = jnp.concatenate(masked, axis=1) if together > 1 else masked[0]
        product = jnp.dot(own.astype(up.dtype), up, precision=precision, preferred_element_type=jnp.float32)
        summed = (base_ref[...].astype(jnp.float32) + product).astype(out_ref.dtype)
        is_met_M1 = owners[0]
        for is_own_M1 in owners[1:]:
            is_met_M1 |= is_own_M1
        out_ref[...] = jnp.where(is_met_M1, summed, out_ref[...])

    return body


def _owners(ids_ref: Any, met: Any, step: Any, together: int) -> list[Any]:
    """Return which rows have each of a step's adapters, ``[M, 1]``."""
    ids, steps = ids_ref[...], met.shape[0] // together
    return [ids == met[place * steps + step] for place in range(together)]


def _joined(refs: Sequence[Any]) -> Any:
    return jnp.concatenate([each[...] for each in refs], axis=0) if len(refs) > 1 else refs[0][...]
