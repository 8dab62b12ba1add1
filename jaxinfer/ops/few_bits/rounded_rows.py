"""Rows of activations in int8: each number is ``scale * code``, with one scale for the whole row.

A row's codes depend on the row alone. Sums of products of such codes with those of weights are integers, which are
exact in any order.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.notation import Array, Float, Int8
from jaxinfer.ops.few_bits.formats import GROUPS, Format

_MOST_BYTE = 127
# Multiplied by: for a division compilers would choose this, or not.
STEP = float(np.float32(1 / _MOST_BYTE))
# Why a mixture of experts is refused.
NO_EXPERTS = "experts multiply rows as they are: leave activations= out"
# So many products of codes, the largest of 8 bits, fit into 31 bits.
MOST_INPUTS = (2**31 - 1) // (_MOST_BYTE * 128)


class RoundedRows(NamedTuple):
    """Codes ``[M, K]`` and the scales ``[M, 1]``, in float32."""

    codes_MK: Int8[Array, "M K"]
    scales_M1: Float[Array, "M 1"]


def multiplies_rounded(form: Format) -> bool:
    """Whether rows in int8 multiply weights of a form: integers of 4 or 8 bits in equal groups, or bytes in rows."""
    is_plain = form.offset is not None and form.supers is None and not (form.has_zeros or form.is_ordered)
    in_rows = form.group is None and form.bits == 8 and not form.has_minima
    return is_plain and form.bits in (4, 8) and (in_rows or form.group in GROUPS)


def round_rows(rows_MK: Float[Array, "M K"], most_M1: Float[Array, "M 1"] | None = None) -> RoundedRows:
    """Round rows to int8; ``most_M1`` are the sizes of their largest numbers, if the rows are parts of others."""
    rows_MK = rows_MK.astype(jnp.float32)
    if most_M1 is None:
        most_M1 = largest(rows_MK)
    scales_M1 = most_M1 * np.float32(STEP)
    codes_MK = jnp.round(rows_MK / jnp.where(scales_M1 == 0, 1, scales_M1))
    return RoundedRows(codes_MK.astype(jnp.int8), scales_M1)


def largest(rows_MK: Float[Array, "M K"]) -> Float[Array, "M 1"]:
    """Return the size of each row's largest number, in float32."""
    return jnp.max(jnp.abs(rows_MK.astype(jnp.float32)), axis=-1, keepdims=True)
