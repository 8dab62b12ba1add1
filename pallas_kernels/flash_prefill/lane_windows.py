"""Where a head stands among the lanes of a flat cache ``[.., K * H]``, in whole lane tiles.

A head that is not whole tiles of 128 lanes is read with its neighbours in the tiles: its queries stand among zeros, so
that the product over the window is the product over the head, and of the mixed values the head's own lanes are kept.
For heads of 64 that costs the matrix unit nothing; heads of 80 and 96, which straddle tiles, take two tiles each.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.head_groups import LANES


@dataclass(frozen=True)
class LaneWindows:
    """Windows of ``width`` lanes, one a key/value head; all lanes are one window where they are not whole tiles.

    A slot has ``lanes`` lanes, of which the heads fill the first K * H.
    """

    num_kv_heads: int
    head_dim: int
    lanes: int

    @property
    def width(self) -> int:
        """W: how many lanes a window has."""
        if self.lanes % LANES:
            return self.lanes
        if self.head_dim % LANES == 0:
            return self.head_dim
        if LANES % self.head_dim == 0:
            return LANES
        return min((self.head_dim // LANES + 2) * LANES, self.lanes)

    @property
    def parts(self) -> int:
        """How many blocks a window is read in: one, or tiles where windows do not start at multiples of their width."""
        return 1 if self._regular else self.width // LANES

    @property
    def _regular(self) -> bool:
        return self.head_dim % LANES == 0 or LANES % self.head_dim == 0 or self.width == self.lanes

    def block_index(self, kv_head: Any, part: int) -> Any:
        """Return which block of ``width / parts`` lanes is that part of a head's window."""
        if self.width == self.lanes:
            return 0
        if self._regular:
            return lax.div(kv_head * self.head_dim, self.width)
        first = lax.div(kv_head * self.head_dim, LANES)
        return jnp.minimum(first, (self.lanes - self.width) // LANES) + part

    def offset(self, kv_head: int) -> int:
        """Return the lane of its window in which a head starts."""
        first = kv_head * self.head_dim
        return first - min(first // LANES * LANES, self.lanes - self.width)

    def spread(self, query_BTNH: jax.Array) -> jax.Array:
        """Put each query in the lanes of its key/value head, among zeros: ``[B, T, N * W]``."""
        batch, tokens, num_heads, head_dim = query_BTNH.shape
        if self.width != head_dim:
            query_BTKGH = query_BTNH.reshape(batch, tokens, self.num_kv_heads, -1, head_dim)
            query_BTNH = _move_lanes("BTKGH,KHW->BTKGW", query_BTKGH, self._places_KHW())
        return query_BTNH.reshape(batch, tokens, num_heads * self.width)

    def gather(self, mixed_BTI: jax.Array) -> jax.Array:
        """Take each head's own lanes: ``[B, T, N, H]`` from ``[B, T, N * W]``."""
        batch, tokens, _ = mixed_BTI.shape
        if self.width != self.head_dim:
            mixed_BTKGW = mixed_BTI.reshape(batch, tokens, self.num_kv_heads, -1, self.width)
            mixed_BTI = _move_lanes("BTKGW,KHW->BTKGH", mixed_BTKGW, self._places_KHW())
        return mixed_BTI.reshape(batch, tokens, -1, self.head_dim)

    def _places_KHW(self) -> np.ndarray:
        """Return where each number of a head stands in its window."""
        places_KHW = np.zeros((self.num_kv_heads, self.head_dim, self.width), bool)
        for head in range(self.num_kv_heads):
            number_H = np.arange(self.head_dim)
            places_KHW[head, number_H, self.offset(head) + number_H] = True
        return places_KHW


def _move_lanes(equation: str, array: jax.Array, places_KHW: np.ndarray) -> jax.Array:
    """Multiply by zeros and ones, which is exact, and leaves the moving to the matrix unit: shifts take longer."""
    precision = lax.Precision.HIGHEST if array.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, array, jnp.asarray(places_KHW, array.dtype), precision=precision)
