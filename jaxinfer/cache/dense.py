"""The dense cache: preallocated, one slot per position, written in place.

Its layout is ``[L, B, S, K*H]``; a head is a slice of lanes. Of the layouts tried with the TPU compiler, only this one
avoids both a copy of the whole cache at a decode step and a new layout for kernels, at any number of heads per device.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.cache.slots import empty_buffers, move_slots, path_moves, read_slots, slots_for, slots_in_tiles
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import Seen, attend_to_layer
from jaxinfer.ops.cache_write import write_to_layer
from jaxinfer.ops.masks import Window, visible_slots
from jaxinfer.ops.ring_attention import attend_around_ring
from jaxinfer.ops.split_slots import attend_to_split_slots, has_split_slots


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=["window"])
@dataclass(frozen=True)
class DenseCache:
    """Keys and values ``[L, B, S, K*H]``; slot ``s`` of a row holds the token at position ``s``.

    ``window`` is how far back a query attends; None means to all.
    """

    keys: Any
    values: Any
    window: Window | None = None

    @property
    def num_slots(self) -> int:
        """S: the slots of a row."""
        return int(self.keys.shape[2])

    @property
    def batch(self) -> int:
        """B: the number of rows."""
        return int(self.keys.shape[1])

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the slots from ``start_B`` on; padding is written too, past the committed tokens."""
        return place_in_order(start_B, ancestors_BTA, counts_B, extent or self.keys.shape[2], self.window)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "DenseCache"]:
        """Write the new tokens, then attend to the slots of the placement's mask."""
        new = keys_BTKH, values_BTKH
        if has_split_slots(self.keys, backend):
            held = self.keys, self.values, *new
            rule = {**scores.rule, "window": self.window}
            if placement.seen.order_T is not None:
                attended = attend_around_ring(query_BTNH, *held, layer, scores.scale, backend, **rule)
            else:
                places = placement.slots_BT, placement.seen
                attended = attend_to_split_slots(query_BTNH, *held, layer, *places, scores.scale, backend, **rule)
            mixed, keys, values = attended
            return mixed, replace(self, keys=keys, values=values)
        keys, values = write_to_layer(self.keys, self.values, *new, layer, placement.slots_BT, backend)
        options = {**scores.rule, "window": self.window, "num_kv_heads": keys_BTKH.shape[2]}
        mixed = attend_to_layer(query_BTNH, keys, values, layer, placement.seen, scores.scale, backend, **options)
        return mixed, replace(self, keys=keys, values=values)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "DenseCache":
        """Move the path's slots to the left; slots past ``count_B`` do not change."""
        if path_BM.shape[1] == 1:
            return self
        from_BM, to_BM = (start_B[:, None] + places_BM for places_BM in path_moves(path_BM, count_B))
        return replace(self, keys=move_slots(self.keys, from_BM, to_BM), values=move_slots(self.values, from_BM, to_BM))

    def read(self, slots_BM: Int[Array, "B M"]) -> tuple[Array, Array]:
        """Return the keys and values ``[L, B, M, K*H]`` of slots of every layer; zeros for slots past the end."""
        return read_slots(self.keys, slots_BM), read_slots(self.values, slots_BM)

    def rows_of_layer(self, buffers: tuple[Array, Array], layer: Int[Array, ""] | int) -> tuple[Array, Array]:
        """Return a layer's keys and values ``[B, S, K*H]`` of all rows, from buffers laid out as the cache's."""
        return buffers[0][layer], buffers[1][layer]


def place_in_order(
    start_B: Int[Array, " B"],
    ancestors_BTA: Bool[Array, "#B T A"],
    counts_B: Int[Array, " B"] | None,
    num_slots: int,
    window: Window | None,
) -> Placement:
    """Place new tokens where slot ``s`` of a row holds the token at position ``s``; see `Cache.place`.

    They may be the last of a tree whose other tokens stand from ``start_B`` on already (`visible_slots`).
    """
    num_new, num_tokens = ancestors_BTA.shape[1:]
    slots_BT = start_B[:, None] + jnp.arange(num_tokens - num_new, num_tokens, dtype=start_B.dtype)
    mask_BTS = visible_slots(start_B, ancestors_BTA, num_slots, window)
    return Placement(slots_BT, mask_BTS, seen=Seen(start_B, ancestors_BTA, counts_B, mask_BTS))


def create_dense_cache(
    num_layers: int,
    batch: int,
    num_slots: int,
    lanes: int,
    backend: Backend,
    window: Window | None = None,
    has_values: bool = True,
) -> DenseCache:
    """Return a cache of zeros for ``batch`` rows of ``num_slots`` slots with ``lanes`` values each, K * H or more.

    If slots are split over devices, a few are added so that each device has the same number of whole tiles. Without
    values of their own, keys are values too (`jaxinfer.models.latent`).
    """
    shards = backend.slot_shards
    if shards > 1:
        num_slots = slots_for(-(-num_slots // shards)) * shards
    num_slots = slots_in_tiles(num_slots // shards, backend) * shards
    shape = (num_layers, batch, num_slots, lanes)
    return DenseCache(*empty_buffers(shape, backend, has_values), window)
