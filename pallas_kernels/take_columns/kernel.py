"""The body of take_columns: of the tiles of 128 columns that hold the one to be taken, it turns this one.

A column's numbers lie in one lane, and are needed side by side. A product with ones adds up over lanes, of which all
but one are zero, and turns what it adds up. Bytes go through it one after the other, so it is exact for any number.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
# The rows of a tile of 32-bit numbers.
_ROW_TILE = 8
_BYTE_BITS = 8


def take_body(rows: int, num_parts: int) -> Any:
    """Return the body for so many arrays, of which ``rows`` rows are turned at once."""

    def body(_tiles: Any, lanes: Any, *refs: Any) -> None:
        lane = lanes[pl.program_id(0)]
        for part_ref, out_ref in zip(refs[:num_parts], refs[num_parts:], strict=True):
            height = part_ref.shape[0]
            for first in range(0, height, rows):
                some = slice(first, min(first + rows, height))
                out_ref[:, some] = _turned(part_ref[some, :], lane)

    return body


def _turned(tile_KL: jax.Array, lane: Any) -> jax.Array:
    """Return the bits of one lane of a tile, side by side: int32 ``[1, K]``, without what extends a sign."""
    height = tile_KL.shape[0]
    itemsize = jnp.dtype(tile_KL.dtype).itemsize
    if tile_KL.dtype == jnp.float32:
        bits_KL = lax.bitcast_convert_type(tile_KL, jnp.int32)
    else:
        bits_KL = tile_KL.astype(jnp.int32)
    if height == 1:  # the compiler turns no single row
        bits_KL = jnp.concatenate([bits_KL, bits_KL])
    is_taken_KL = lax.broadcasted_iota(jnp.int32, bits_KL.shape, 1) == lane
    bits_KL = jnp.where(is_taken_KL, bits_KL, 0)
    ones_RL = jnp.ones((_ROW_TILE, LANES), jnp.bfloat16)
    found_RK = jnp.zeros((_ROW_TILE, bits_KL.shape[0]), jnp.int32)
    for byte in range(itemsize):
        one_KL = (lax.shift_right_logical(bits_KL, jnp.int32(_BYTE_BITS * byte)) & 255).astype(jnp.bfloat16)
        turned_RK = lax.dot_general(ones_RL, one_KL, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        found_RK |= lax.shift_left(turned_RK.astype(jnp.int32), jnp.int32(_BYTE_BITS * byte))
    return found_RK[:1, :height]
