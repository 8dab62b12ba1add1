"""Where a head stands among the lanes of a flat cache ``[.., K * H]``, which is read in whole lane tiles.

A head that is not whole tiles of 128 lanes comes with parts of its neighbours. It is rolled to the first lanes, where
the queries stand too, with zeros after them: so the product over whole tiles is the product over the head, and of the
mixed values the first H lanes are the head's. Rolling a block of slots costs little beside its products with a block
of queries.
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
    """The tiles that hold each head of ``head_dim`` numbers in slots of ``lanes``, a multiple of 128."""

    head_dim: int
    lanes: int

    @property
    def width(self) -> int:
        """W: the head's lanes in whole tiles."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def block_lanes(self) -> int:
        """The lanes of a block of the cache."""
        return self.width if self.head_dim % LANES == 0 else LANES

    @property
    def parts(self) -> int:
        """How many neighbouring blocks a head is read in."""
        if self.head_dim % LANES == 0 or LANES % self.head_dim == 0:
            return 1
        # It may begin and end in the midst of tiles.
        return min(self.head_dim // LANES + 2, self.lanes // LANES)

    def block_index(self, kv_head: Any, part: int) -> Any:
        """Return which block is that part of a head's window."""
        first = lax.div(kv_head * self.head_dim, self.block_lanes)
        return jnp.minimum(first, self.lanes // self.block_lanes - self.parts) + part

    def align(self, parts: Sequence[jax.Array], kv_head: Any) -> jax.Array:
        """Return ``[S, W]``, whose first lanes are the head's, of the parts of its window."""
        window_SI = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if self.head_dim % LANES == 0:
            return window_SI
        offset = kv_head * self.head_dim - self.block_index(kv_head, 0) * self.block_lanes
        lanes = window_SI.shape[1]
        # The unit that rolls takes numbers of 32 bits: of 16 bits it takes those of two slots together.
        packed = window_SI if window_SI.dtype.itemsize == 4 else pltpu.bitcast(window_SI, jnp.uint32)
        rolled = pltpu.roll(packed, jnp.where(offset == 0, 0, lanes - offset), 1)[:, : self.width]
        return rolled if window_SI.dtype.itemsize == 4 else pltpu.bitcast(rolled, window_SI.dtype)
