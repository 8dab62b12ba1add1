"""Rows of a cache in bytes: int8 numbers of all heads side by side, and behind them a scale for each head.

A row of K heads has K * H numbers, then the upper bytes of K bfloat16 scales, then their lower bytes, and anything
after that. A kernel multiplies by the numbers as they are, and what comes of it by the scales: a score by its key's, a
weight by its value's. Scales lie in the lanes of a slot but are needed in slots' lanes, so a product with rows of one
and zeros turns them; it is exact.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.head_groups import LANES

SCALE_BYTES = 2
# The rows of a tile of 32-bit numbers.
_ROW_TILE = 8


@dataclass(frozen=True)
class ByteRows:
    """Rows of ``width`` bytes with ``num_kv_heads`` heads; ``rows_per_head`` rows of queries share one of them."""

    num_kv_heads: int
    head_dim: int
    width: int
    rows_per_head: int

    @property
    def lanes(self) -> int:
        """The lanes that hold numbers, in whole tiles."""
        return -(-self.num_kv_heads * self.head_dim // LANES) * LANES

    @property
    def tail(self) -> int:
        """The first lane of the tiles that hold the scales."""
        return self.num_kv_heads * self.head_dim // LANES * LANES

    @property
    def scale_rows(self) -> int:
        """The rows of turned scales: heads, in whole tiles."""
        return -(-self.num_kv_heads // _ROW_TILE) * _ROW_TILE

    def scales(self, tail_SI: jax.Array, is_written_1S: jax.Array) -> jax.Array:
        """Return float32 scales, slots side by side and heads below one another; zeros where nothing is written."""
        heads = self.num_kv_heads
        first = heads * self.head_dim - self.tail
        rows = self.scale_rows
        row_RI, lane_RI = (lax.broadcasted_iota(jnp.int32, (2 * rows, tail_SI.shape[1]), axis) for axis in (0, 1))
        is_lower_RI = row_RI >= rows
        head_RI = row_RI - jnp.where(is_lower_RI, rows, 0)
        is_own_RI = (head_RI < heads) & (lane_RI == first + head_RI + jnp.where(is_lower_RI, heads, 0))
        picked = jnp.where(is_own_RI, 1.0, 0.0).astype(jnp.bfloat16)
        bytes_RS = lax.dot_general(
            picked, tail_SI.astype(jnp.bfloat16), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.int32)
        bits_KS = lax.shift_left(bytes_RS[:rows], jnp.int32(24)) | lax.shift_left(bytes_RS[rows:] & 255, jnp.int32(16))
        # Slots that nobody has written may hold anything, and zero times what is not a number is none either.
        return jnp.where(is_written_1S, lax.bitcast_convert_type(bits_KS, jnp.float32), 0.0)

    def of_rows(self, scales_KS: Any, group: int, groups: int, first_row: Any, like_RS: jax.Array) -> jax.Array:
        """Return the scale of each row's head in each slot, for rows from ``first_row`` on of a group of heads."""
        joined = self.num_kv_heads // groups
        first = group * joined
        own_RS = scales_KS[first : first + 1, :]
        row_RS = first_row + lax.broadcasted_iota(jnp.int32, like_RS.shape, 0)
        for head in range(1, joined):
            next_1S = scales_KS[first + head : first + head + 1, :]
            own_RS = jnp.where(row_RS >= head * self.rows_per_head, next_1S, own_RS)
        return own_RS


def to_numbers(rows: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    """Return the float32 that rows ``[.., F]`` stand for, ``[.., K * H]``; for references."""
    width = num_kv_heads * head_dim
    bytes_ = lax.bitcast_convert_type(rows[..., width : width + 2 * num_kv_heads], jnp.uint8).astype(jnp.uint32)
    bits = (bytes_[..., :num_kv_heads] << 24) | (bytes_[..., num_kv_heads:] << 16)
    scales = jnp.repeat(lax.bitcast_convert_type(bits, jnp.float32), head_dim, axis=-1)
    return rows[..., :width].astype(jnp.float32) * scales


def check_rows(kernel: str, width: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError if rows of ``width`` bytes do not hold so many heads with their scales."""
    if num_kv_heads < 1 or width < num_kv_heads * (head_dim + SCALE_BYTES) or width % LANES:
        raise ValueError(
            f"{kernel}: rows of {width} bytes do not hold {num_kv_heads} heads of {head_dim} with their scales, or are "
            f"no multiple of {LANES}"
        )
