"""The streaming cache: a sequence's first and last tokens, in constant memory (StreamingLLM, 2309.17453).

The first tokens, the sinks, stay. After them come the last W tokens, as if there were none between: a token's rotary
position is its place in the cache, not in the sequence. Keys are stored rotated for their place in the sequence, as in
any cache. Distances among the last W tokens are then already right. For the sinks, the query is rotated back by the
number of evicted tokens.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement, Scores, WholeCache
from jaxinfer.cache.layouts import StreamingLayout
from jaxinfer.cache.slots import (
    empty_buffers,
    move_slots,
    path_moves,
    put_slots,
    slots_for,
    slots_in_tiles,
)
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.attention import Sinks, attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import Seen, attend_to_ring, ring_order
from jaxinfer.ops.cache_write import Around, as_rows, write_to_layer
from jaxinfer.ops.hadamard import evened_query, transform
from jaxinfer.ops.masks import in_window, node_depths
from jaxinfer.ops.rotation import rotate
from jaxinfer.ops.rows_in_bytes import holds_bytes
from jaxinfer.ops.split_tokens import gather_tokens


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=["sinks", "window", "renumbers"])
@dataclass(frozen=True)
class StreamingCache:
    """Keys and values ``[L, B, sinks + C, K*H]``: the sinks, then a ring of C slots for all later positions.

    A query attends to the sinks and the last ``window`` tokens, itself included. As in a `RingCache`, decoding may go
    back at most C - window + 1 written positions. No draft tree may be deeper than ``window``. ``renumbers`` means that
    rotary positions are places in the cache. Otherwise they are places in the sequence, which must fit the model's
    context.
    """

    keys: Any
    values: Any
    sinks: int
    window: int
    renumbers: bool = True

    @property
    def capacity(self) -> int:
        """C: the number of the ring's slots per row."""
        return self.keys.shape[2] - self.sinks

    def slots(self, positions: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the slot of each position of a sequence."""
        return jnp.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.capacity)

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in sinks and ring; padding is not written: it would overwrite tokens in the window."""
        num_tokens, batch = ancestors_BTA.shape[-1], start_B.shape[0]
        index_T = jnp.arange(num_tokens, dtype=start_B.dtype)
        position_BT = start_B[:, None] + node_depths(ancestors_BTA).astype(start_B.dtype)
        is_near_BTT = (position_BT < self.sinks)[:, None, :] | in_window(position_BT, position_BT, self.window)
        new_BTT = jnp.broadcast_to(ancestors_BTA & is_near_BTT, (batch, num_tokens, num_tokens))
        place_BS = next_places(start_B, self.sinks, self.capacity)
        offset_BS = place_BS - start_B[:, None]
        is_new_BS = (offset_BS >= 0) & (offset_BS < num_tokens)
        as_new_BTS = jnp.take_along_axis(new_BTT, jnp.clip(offset_BS, 0, num_tokens - 1)[:, None, :], axis=2)
        # The token in each slot before the new tokens are written.
        is_sink_S = jnp.arange(place_BS.shape[1]) < self.sinks
        old_BS = jnp.where(is_sink_S, place_BS, place_BS - self.capacity)
        is_held_BS = jnp.where(is_sink_S, place_BS < start_B[:, None], old_BS >= self.sinks)
        old_BTS = is_held_BS[:, None, :] & (is_sink_S | in_window(position_BT, old_BS, self.window))
        last_B1 = jnp.full((batch, 1), num_tokens) if counts_B is None else jnp.minimum(counts_B, num_tokens)[:, None]
        is_written_BT = index_T < last_B1
        text_BT = start_B[:, None] + index_T
        if num_tokens > self.capacity - self.window + 1:
            is_written_BT &= (text_BT < self.sinks) | (index_T >= last_B1 - self.capacity)
            in_place_BTS = jnp.where((is_new_BS & is_sink_S)[:, None, :], as_new_BTS, old_BTS)
            beside_BTT = new_BTT & (text_BT >= self.sinks)[:, None, :]
            mask_BTS = jnp.concatenate([in_place_BTS, beside_BTT], axis=-1)
        else:
            mask_BTS = jnp.where(is_new_BS[:, None, :], as_new_BTS, old_BTS)
        shift_BT = jnp.maximum(position_BT + 1 - self.sinks - self.window, 0) if self.renumbers else None
        slots_BT = jnp.where(is_written_BT, self.slots(text_BT), self.keys.shape[2])
        return Placement(slots_BT, mask_BTS, shift_BT, seen=Seen(start_B, ancestors_BTA, counts_B, mask_BTS))

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "StreamingCache"]:
        """Attend inside the ring if the new tokens fit into it, else to the old ring and the new tokens."""
        around = Around(placement.seen.start_B, placement.written_B(self.keys.shape[2]), self.sinks)
        keys_BTKH = gather_tokens(keys_BTKH, placement.seen, backend)
        values_BTKH = gather_tokens(values_BTKH, placement.seen, backend)
        new = keys_BTKH, values_BTKH
        keys, values = write_to_layer(self.keys, self.values, *new, layer, placement.slots_BT, backend, around)
        sink_query_BTNH = None
        if placement.rotation is not None and self.sinks:
            cosines_BTR, sines_BTR = placement.rotation
            is_even = holds_bytes(keys.dtype)
            own_BTNH = transform(query_BTNH, backend.platform).astype(query_BTNH.dtype) if is_even else query_BTNH
            sink_query_BTNH = rotate(own_BTNH, cosines_BTR, -sines_BTR)
            if is_even:
                sink_query_BTNH = evened_query(sink_query_BTNH, backend.platform)
        if placement.mask_BTS.shape[-1] == self.keys.shape[2]:
            mixed = attend_to_ring(
                query_BTNH,
                keys,
                values,
                layer,
                placement.seen,
                scores.scale,
                backend,
                window=self.window,
                **scores.rule,
                num_sinks=self.sinks,
                sink_query_BTNH=sink_query_BTNH,
                num_kv_heads=keys_BTKH.shape[2],
            )
        else:
            mixed = attend(
                query_BTNH,
                self._beside(keys[layer], self.keys[layer], keys_BTKH, backend),
                self._beside(values[layer], self.values[layer], values_BTKH, backend),
                placement.mask_BTS,
                scores.scale,
                backend,
                **scores.rule,
                sinks=None if sink_query_BTNH is None else Sinks(sink_query_BTNH, self.sinks),
                num_kv_heads=keys_BTKH.shape[2],
                order=ring_order(placement.seen.start_B, self.sinks, self.keys.shape[2]),
            )
        return mixed, replace(self, keys=keys, values=values)

    def keep(
        self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]
    ) -> "StreamingCache":
        """Move the path's slots together; slots past ``count_B`` do not change."""
        if path_BM.shape[1] == 1:
            return self
        from_BM, to_BM = (self.slots(start_B[:, None] + places_BM) for places_BM in path_moves(path_BM, count_B))
        return replace(self, keys=move_slots(self.keys, from_BM, to_BM), values=move_slots(self.values, from_BM, to_BM))

    def refreshed(self, cache: WholeCache, positions_BM: Int[Array, "B M"]) -> "StreamingCache":
        """Copy the tokens at these positions from the cache that holds the whole sequence."""
        slots_BM, (keys, values) = self.slots(positions_BM), cache.read(positions_BM)
        return replace(self, keys=put_slots(self.keys, slots_BM, keys), values=put_slots(self.values, slots_BM, values))

    def _beside(self, written_BSI: jax.Array, old_BSI: jax.Array, new_BTKH: jax.Array, backend: Backend) -> jax.Array:
        parts = written_BSI[:, : self.sinks], old_BSI[:, self.sinks :], as_rows(new_BTKH, old_BSI, backend)
        return jnp.concatenate(parts, axis=1)


def next_places(start_B: Int[Array, " B"], sinks: int, capacity: int) -> Int[Array, "B S"]:
    """Return the next position of each slot, from ``start_B`` on; a sink's slot has only one position."""
    slot_S = jnp.arange(sinks + capacity, dtype=start_B.dtype)
    first_B1 = jnp.maximum(start_B, sinks)[:, None]
    return jnp.where(slot_S < sinks, slot_S, first_B1 + (slot_S - first_B1) % capacity)


def create_streaming_cache(
    num_layers: int,
    batch: int,
    layout: StreamingLayout,
    headroom: int,
    lanes: int,
    backend: Backend,
    has_values: bool = True,
) -> StreamingCache:
    """Return a streaming cache of zeros for ``batch`` rows with ``lanes`` values per slot, K * H or more."""
    if headroom > layout.window:
        raise InvalidOption(
            f"cache streaming: a step writes up to {headroom} tokens, more than window={layout.window} holds: choose a "
            "larger window or a strategy that drafts less"
        )
    shape = (num_layers, batch, slots_for(layout.sinks + layout.window + headroom), lanes)
    shape = (*shape[:2], slots_in_tiles(shape[2], backend), lanes)
    return StreamingCache(*empty_buffers(shape, backend, has_values), layout.sinks, layout.window)


def streaming_part(
    cache: WholeCache, start_B: Int[Array, " B"], sinks: int, window: int, headroom: int
) -> StreamingCache:
    """Copy the sinks and the last ``window`` of each row's first ``start_B`` tokens; positions stay the sequence's."""
    capacity = slots_for(sinks + window + headroom) - sinks
    next_BS = next_places(start_B, sinks, capacity)
    held_BS = jnp.where(jnp.arange(sinks + capacity) < sinks, next_BS, next_BS - capacity)
    keys, values = cache.read(jnp.maximum(held_BS, 0))
    return StreamingCache(keys, values, sinks, window, renumbers=False)
