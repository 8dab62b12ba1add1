"""The place of a head in the lanes of a flat cache ``[.., K * H]``, which is read in whole lane tiles.

If a head is not whole tiles of 128 lanes, parts of its neighbours are read too. The head is rolled to the first lanes.
There the queries have the head's lanes, and zeros after them. So the product over whole tiles equals the product over
the head, and the first H lanes of the mixed values are the head's. Rolling a block of slots costs little compared to
its products with a block of queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.head_groups import LANES


@dataclass(frozen=True)
class LaneWindows:
    """The tiles that hold each head of width ``head_dim`` in slots of ``lanes`` lanes, a multiple of 128."""

    head_dim: int
    lanes: int

    @property
    def width(self) -> int:
        """W: the head's lanes, in whole tiles."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def block_lanes(self) -> int:
        """The lanes of a block of the cache."""
        return self.width if self.head_dim % LANES == 0 else LANES

    @property
    def parts(self) -> int:
        """The number of neighbouring blocks that hold a head."""
        if self.head_dim % LANES == 0 or LANES % self.head_dim == 0:
            return 1
        # A head may begin and end inside a tile.
        return min(self.head_dim // LANES + 2, self.lanes // LANES)

    def block_index(self, kv_head: Any, part: int) -> Any:
        """Return the index of the block for one part of a head's window."""
        first = lax.div(kv_head * self.head_dim, self.block_lanes)
        return jnp.minimum(first, self.lanes // self.block_lanes - self.parts) + part

    def align(self, parts: Sequence[jax.Array], kv_head: Any) -> jax.Array:
        """Return ``[S, W]`` from the parts of a head's window; its first lanes are the head's."""
        window_SI = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if self.head_dim % LANES == 0:
            return window_SI
        offset = kv_head * self.head_dim - self.block_index(kv_head, 0) * self.block_lanes
        lanes = window_SI.shape[1]
        # The roll unit works on 32-bit numbers: 16-bit numbers of two slots are rolled together.
        packed = window_SI if window_SI.dtype.itemsize == 4 else pltpu.bitcast(window_SI, jnp.uint32)
        rolled = pltpu.roll(packed, jnp.where(offset == 0, 0, lanes - offset), 1)[:, : self.width]
        return rolled if window_SI.dtype.itemsize == 4 else pltpu.bitcast(rolled, window_SI.dtype)
