"""Which slot of a cache holds which token, and which slots new tokens attend to."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.ancestors import depth_of_rows, sees_new_token
from pallas_kernels.window import Window, oldest


@runtime_checkable
class SlotOrder(Protocol):
    """The order of a cache's slots; ``start`` is the position of a row's first new token.

    `sees_all`, `visible` and `end` also run inside kernels. The first ``num_sinks`` slots use their own query.
    """

    @property
    def num_slots(self) -> int:
        """S."""
        ...

    @property
    def num_sinks(self) -> int:
        """The number of slots at the front that hold sinks."""
        ...

    @property
    def window(self) -> Window | None:
        """How far back a query attends, without sinks."""
        ...

    @property
    def max_start(self) -> int:
        """The last position at which new tokens may start; starts are clipped to it."""
        ...

    def block_range(self, start_B: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """Return the first and the last block of slots that any query of a row attends to."""
        ...

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return the slot of each row's first new token that is not a sink."""
        ...

    def end(self, start: Any) -> Any:
        """Return the first unwritten slot."""
        ...

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether every query attends to every slot of a block."""
        ...

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return ``[R, S]``: which slots each row of queries attends to."""
        ...


@dataclass(frozen=True)
class DenseOrder:
    """Slot s holds the token at position s; the first of ``num_tokens`` new tokens is in slot ``start``."""

    num_tokens: int
    num_slots: int
    window: Window | None

    @property
    def num_sinks(self) -> int:
        """Zero: a dense cache has no sinks."""
        return 0

    @property
    def max_start(self) -> int:
        """The cache's end: tokens past it have no slot."""
        return self.num_slots

    def block_range(self, start_B: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """Return the blocks from the first query's window to the last new token."""
        last_B = (self.end(start_B) - 1) // block
        if self.window is None:
            return jnp.zeros_like(last_B), last_B
        return jnp.maximum(oldest(self.window, start_B), 0) // block, last_B

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return the starts."""
        return start_B

    def end(self, start: Any) -> Any:
        """Return the slot after the last new token."""
        return jnp.minimum(start + self.num_tokens, self.num_slots)

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether all slots of the block are older than the new tokens and in every window."""
        is_old = first_slot + slots <= start
        if self.window is None:
            return is_old
        return is_old & (first_slot >= oldest(self.window, start + self.num_tokens - 1))

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return the visible slots: old slots in the window, and the new tokens' ancestors."""
        offset_1S = slot_1S - start
        old_RS = offset_1S < 0
        if self.window is not None:
            old_RS &= slot_1S >= oldest(self.window, start + depth_of_rows(encoded_RA))
        return old_RS | ((slot_1S < self.num_slots) & sees_new_token(encoded_RA, offset_1S))


@dataclass(frozen=True)
class ChainOrder(DenseOrder):
    """A `DenseOrder` of new tokens that are a chain: each sees the slots up to its own.

    The encoded rows are `encode_places`.
    """

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return the visible slots: those up to the token's own, in the window."""
        own_R1 = start + encoded_RA[:, :1]
        seen_RS = slot_1S <= own_R1
        return seen_RS if self.window is None else seen_RS & (slot_1S >= oldest(self.window, own_R1))


@dataclass(frozen=True)
class RingOrder:
    """The first ``num_sinks`` positions, then a ring for all later ones; a query attends to a ``window`` of the ring's.

    Position p is slot p, or ``num_sinks + (p - num_sinks) % capacity``. At most capacity + 1 less the window's width
    are new, so that none overwrites a visible one.
    """

    num_tokens: int
    num_slots: int
    window: Window
    num_sinks: int

    @property
    def capacity(self) -> int:
        """The number of slots in the ring."""
        return self.num_slots - self.num_sinks

    @property
    def max_start(self) -> int:
        """Low enough for 32-bit sums of a position and a number of slots."""
        return 1 << 30

    def block_range(self, start_B: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """Return all written blocks."""
        return jnp.zeros_like(start_B), (self.end(start_B) - 1) // block

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return the ring slot where the new tokens begin."""
        return self.num_sinks + jnp.maximum(start_B - self.num_sinks, 0) % self.capacity

    def end(self, start: Any) -> Any:
        """Return the slot after the last written one."""
        return jnp.minimum(start + self.num_tokens, self.num_slots)

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether a block is in the ring, older than the new tokens, and in every window."""
        first = jnp.maximum(start, self.num_sinks)
        offset = self._around(first_slot - first_new)
        held = first + offset - self.capacity
        return (
            (first_slot >= self.num_sinks)
            & (first_slot + slots <= self.num_slots)
            & (first + offset - start >= self.num_tokens)
            & (offset + slots <= self.capacity)
            & (held >= self.num_sinks)
            & (held >= oldest(self.window, start + self.num_tokens - 1))
        )

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return the visible slots: sinks, old slots in the window, and the new tokens' ancestors."""
        first = jnp.maximum(start, self.num_sinks)
        is_sink_1S = slot_1S < self.num_sinks
        # The next position of each slot, from ``start`` on; a sink's slot has only one position.
        next_1S = jnp.where(is_sink_1S, slot_1S, first + self._around(slot_1S - first_new))
        held_1S = next_1S - self.capacity
        offset_1S = next_1S - start
        is_new_1S = (offset_1S >= 0) & (offset_1S < self.num_tokens) & (slot_1S < self.num_slots)
        position_R1 = start + depth_of_rows(encoded_RA)
        old_RS = is_sink_1S & (offset_1S < 0)
        old_RS |= (
            jnp.logical_not(is_sink_1S)
            & jnp.logical_not(is_new_1S)
            & (held_1S >= self.num_sinks)
            & (held_1S >= oldest(self.window, position_R1))
            & (slot_1S < self.num_slots)
        )
        return old_RS | (is_new_1S & sees_new_token(encoded_RA, offset_1S))

    def _around(self, distance: Any) -> Any:
        """Return the forward distance around the ring for a distance between two of its slots."""
        return jnp.where(distance < 0, distance + self.capacity, distance)
