"""The ring cache of sliding-window layers: its size depends on the window, not on the sequence's length.

A ring of C slots holds position p in slot ``p % C``. It overwrites only tokens that no query can attend to any more: a
window of W tokens with M new ones per step, rejected drafts included, needs C >= W + M - 1. If there are more new
tokens (a chunk of a prompt), they attend to the old ring and to themselves, and are written afterwards.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.cache.slots import move_slots, path_moves, slots_for, slots_in_tiles
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import Seen, attend_to_ring, ring_order
from jaxinfer.ops.cache_write import Around, as_rows, write_to_layer
from jaxinfer.ops.masks import Window, in_window, node_depths, widest
from jaxinfer.ops.split_tokens import gather_tokens


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=["window"])
@dataclass(frozen=True)
class RingCache:
    """Keys and values ``[L, B, C, K*H]``; a query attends to those in its ``window``.

    Decoding may go back at most C + 1 written positions less the window's width.
    """

    keys: Any
    values: Any
    window: Window

    @property
    def capacity(self) -> int:
        """C: the number of slots per row."""
        return self.keys.shape[2]

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the ring; padding is not written, because it would overwrite tokens in the window."""
        num_tokens, capacity = ancestors_BTA.shape[-1], self.capacity
        index_T = jnp.arange(num_tokens, dtype=start_B.dtype)
        position_BT = start_B[:, None] + node_depths(ancestors_BTA).astype(start_B.dtype)
        # Slot c is ``offset`` places after the first new token, around the ring.
        offset_BC = (jnp.arange(capacity, dtype=start_B.dtype) - start_B[:, None]) % capacity
        old_position_BC = start_B[:, None] - capacity + offset_BC
        old_BTC = in_window(position_BT, old_position_BC, self.window) & (old_position_BC >= 0)[:, None, :]
        new_BTT = ancestors_BTA & in_window(position_BT, position_BT, self.window)
        slots_BT = (start_B[:, None] + index_T) % capacity
        if num_tokens > capacity - widest(self.window) + 1:
            last_B1 = num_tokens if counts_B is None else jnp.minimum(counts_B, num_tokens)[:, None]
            is_written_BT = (index_T < last_B1) & (index_T >= last_B1 - capacity)
            mask_BTS = jnp.concatenate([old_BTC, new_BTT], axis=-1)
        else:
            is_written_BT = jnp.ones_like(slots_BT, bool) if counts_B is None else index_T < counts_B[:, None]
            index_B1C = jnp.minimum(offset_BC, num_tokens - 1)[:, None, :]
            as_new_BTC = jnp.take_along_axis(new_BTT, index_B1C, axis=2)
            mask_BTS = jnp.where((offset_BC < num_tokens)[:, None, :], as_new_BTC, old_BTC)
        seen = Seen(start_B, ancestors_BTA, counts_B, mask_BTS)
        return Placement(jnp.where(is_written_BT, slots_BT, capacity), mask_BTS, seen=seen)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "RingCache"]:
        """Attend inside the ring if the new tokens fit into it, else to the old ring and the new tokens."""
        around = Around(placement.seen.start_B, placement.written_B(self.capacity), 0)
        keys_BTKH = gather_tokens(keys_BTKH, placement.seen, backend)
        values_BTKH = gather_tokens(values_BTKH, placement.seen, backend)
        new = keys_BTKH, values_BTKH
        keys, values = write_to_layer(self.keys, self.values, *new, layer, placement.slots_BT, backend, around)
        rule = {**scores.rule, "num_kv_heads": keys_BTKH.shape[2]}
        if placement.mask_BTS.shape[-1] == self.capacity:
            rule["window"] = self.window
            mixed = attend_to_ring(query_BTNH, keys, values, layer, placement.seen, scores.scale, backend, **rule)
        else:
            held = _beside(self.keys[layer], new[0], backend), _beside(self.values[layer], new[1], backend)
            rule["order"] = ring_order(placement.seen.start_B, 0, self.capacity)
            mixed = attend(query_BTNH, *held, placement.mask_BTS, scores.scale, backend, **rule)
        return mixed, replace(self, keys=keys, values=values)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "RingCache":
        """Move the path's slots together; slots past ``count_B`` do not change."""
        if path_BM.shape[1] == 1:
            return self
        moves = path_moves(path_BM, count_B)
        from_BM, to_BM = ((start_B[:, None] + places_BM) % self.capacity for places_BM in moves)
        return replace(self, keys=move_slots(self.keys, from_BM, to_BM), values=move_slots(self.values, from_BM, to_BM))


def ring_capacity(window: Window, headroom: int) -> int:
    """Return how many slots a window needs if a step writes up to ``headroom`` tokens past the current one."""
    return slots_for(widest(window) + headroom)


def create_ring_cache(
    num_layers: int, batch: int, window: Window, headroom: int, lanes: int, backend: Backend
) -> RingCache:
    """Return a ring of zeros for ``batch`` rows with ``lanes`` values per slot, K * H or more."""
    shape = (num_layers, batch, slots_in_tiles(ring_capacity(window, headroom), backend), lanes)
    return RingCache(jnp.zeros(shape, backend.cache_dtype), jnp.zeros(shape, backend.cache_dtype), window)


def _beside(old_BCI: jax.Array, new_BTKH: jax.Array, backend: Backend) -> jax.Array:
    return jnp.concatenate([old_BCI, as_rows(new_BTKH, old_BCI, backend)], axis=1)
