"""The dense preallocated cache: one slot a position, written in place.

Layout ``[L, B, S, K*H]``, a head being a slice of lanes. Of the layouts tried on the TPU compiler only this one is
neither copied whole at a decode step nor relaid out for a kernel, at any number of heads a device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import visible_slots


class DenseCache(NamedTuple):
    """Keys and values ``[L, B, S, K*H]``; slot ``s`` of a row holds the token at position ``s``."""

    keys: Any
    values: Any

    def place(
        self, start_B: Int[Array, " B"], ancestors_BTT: Bool[Array, "#B T T"], extent: int | None = None
    ) -> Placement:
        """Place new tokens in the slots from ``start_B`` on."""
        num_tokens = ancestors_BTT.shape[-1]
        slots_BT = start_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        return Placement(slots_BT, visible_slots(start_B, ancestors_BTT, extent or self.keys.shape[2]))

    def write(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
    ) -> "DenseCache":
        """Write one layer's new keys and values; slots past the end are dropped."""
        return DenseCache(
            _write(self.keys, layer, placement.slots_BT, keys_BTKH),
            _write(self.values, layer, placement.slots_BT, values_BTKH),
        )

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        scale: float,
        backend: Backend,
    ) -> Float[Array, "B T N H"]:
        """Attend to the slots that the placement's mask spans."""
        extent = placement.mask_BTS.shape[-1]
        keys, values = self.keys[layer, :, :extent], self.values[layer, :, :extent]
        return attend(query_BTNH, keys, values, placement.mask_BTS, scale, backend)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "DenseCache":
        """Move the path's slots to the left; those past ``count_B`` keep what they held."""
        nodes = path_BM.shape[1]
        if nodes == 1:
            return self
        step_M = jnp.arange(nodes, dtype=start_B.dtype)
        from_BM = start_B[:, None] + jnp.where(step_M < count_B[:, None], path_BM, step_M)
        to_BM = start_B[:, None] + step_M
        return DenseCache(_move(self.keys, from_BM, to_BM), _move(self.values, from_BM, to_BM))


def create_dense_cache(num_layers: int, batch: int, num_slots: int, lanes: int, backend: Backend) -> DenseCache:
    """Return a cache of zeros for ``batch`` rows of ``num_slots`` slots of ``lanes`` = K * H numbers each."""
    shape = (num_layers, batch, num_slots, lanes)
    return DenseCache(jnp.zeros(shape, backend.cache_dtype), jnp.zeros(shape, backend.cache_dtype))


def _write(buffer: jax.Array, layer: Int[Array, ""] | int, slots_BT: jax.Array, rows_BTKH: jax.Array) -> jax.Array:
    batch, num_tokens = slots_BT.shape
    rows = rows_BTKH.reshape(batch, num_tokens, -1).astype(buffer.dtype)
    return buffer.at[layer, jnp.arange(batch)[:, None], slots_BT].set(rows, mode="drop", unique_indices=True)


def _move(buffer: jax.Array, from_BM: jax.Array, to_BM: jax.Array) -> jax.Array:
    row_B1 = jnp.arange(from_BM.shape[0])[:, None]
    moved = buffer.at[:, row_B1, from_BM].get(mode="fill", fill_value=0)
    return buffer.at[:, row_B1, to_BM].set(moved, mode="drop", unique_indices=True)
