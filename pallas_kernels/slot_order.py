"""Which slot of a cache holds which token, and what the new tokens see of it."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.ancestors import depth_of_rows, sees_new_token


@runtime_checkable
class SlotOrder(Protocol):
    """The order of a cache's slots; ``start`` is the position of a row's first new token.

    `sees_all` and `visible` run inside kernels, and `end` there too. ``num_sinks`` slots at the front meet a query of
    their own.
    """

    @property
    def num_slots(self) -> int:
        """S."""
        ...

    @property
    def num_sinks(self) -> int:
        """How many slots at the front hold sinks."""
        ...

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, itself included; sinks are not counted."""
        ...

    @property
    def max_start(self) -> int:
        """The last position at which new tokens may start; starts are clipped to it."""
        ...

    def block_range(self, start_B: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """Return the first and the last block of slots that any query of a row sees a part of."""
        ...

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return the slot of each row's first new token that is no sink."""
        ...

    def end(self, start: Any) -> Any:
        """Return the first slot that nothing has been written to."""
        ...

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether every query sees every slot of a block."""
        ...

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return ``[R, S]``, which slots each row of queries sees."""
        ...


@dataclass(frozen=True)
class DenseOrder:
    """Slot s holds the token at position s; of ``num_tokens`` new ones, the first stands in slot ``start``."""

    num_tokens: int
    num_slots: int
    window: int | None

    @property
    def num_sinks(self) -> int:
        """None."""
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
        return jnp.maximum(start_B - self.window + 1, 0) // block, last_B

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return the starts."""
        return start_B

    def end(self, start: Any) -> Any:
        """Return the slot after the last new token."""
        return jnp.minimum(start + self.num_tokens, self.num_slots)

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether all is older than the new tokens and in every window."""
        is_old = first_slot + slots <= start
        if self.window is None:
            return is_old
        return is_old & (first_slot > start + self.num_tokens - 1 - self.window)

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return old slots in the window, and what is seen of the new tokens."""
        offset_1S = slot_1S - start
        old_RS = offset_1S < 0
        if self.window is not None:
            old_RS &= offset_1S > depth_of_rows(encoded_RA) - self.window
        return old_RS | ((slot_1S < self.num_slots) & sees_new_token(encoded_RA, offset_1S))


@dataclass(frozen=True)
class RingOrder:
    """The first ``num_sinks`` positions, then a ring for all later ones, of which a query sees ``window``.

    Position p stands in slot p, or in ``num_sinks + (p - num_sinks) % capacity``. At most capacity - window + 1 tokens
    are new, so that none has taken the place of one that is seen.
    """

    num_tokens: int
    num_slots: int
    window: int
    num_sinks: int

    @property
    def capacity(self) -> int:
        """How many slots the ring has."""
        return self.num_slots - self.num_sinks

    @property
    def max_start(self) -> int:
        """Far enough below the largest 32-bit number for sums of a position and a number of slots."""
        return 1 << 30

    def block_range(self, start_B: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """Return all blocks that have been written to."""
        return jnp.zeros_like(start_B), (self.end(start_B) - 1) // block

    def first_new_slots(self, start_B: jax.Array) -> jax.Array:
        """Return where in the ring the new tokens begin."""
        return self.num_sinks + jnp.maximum(start_B - self.num_sinks, 0) % self.capacity

    def end(self, start: Any) -> Any:
        """Return the slot after the last that has been written to."""
        return jnp.minimum(start + self.num_tokens, self.num_slots)

    def sees_all(self, start: Any, first_new: Any, first_slot: Any, slots: int) -> Any:
        """Tell whether a block lies in the ring, behind the new tokens, and in every window."""
        first = jnp.maximum(start, self.num_sinks)
        offset = self._around(first_slot - first_new)
        oldest = first + offset - self.capacity
        return (
            (first_slot >= self.num_sinks)
            & (first_slot + slots <= self.num_slots)
            & (first + offset - start >= self.num_tokens)
            & (offset + slots <= self.capacity)
            & (oldest >= self.num_sinks)
            & (oldest > start + self.num_tokens - 1 - self.window)
        )

    def visible(self, start: Any, first_new: Any, slot_1S: jax.Array, encoded_RA: jax.Array) -> jax.Array:
        """Return sinks, old slots in the window, and what is seen of the new tokens."""
        first = jnp.maximum(start, self.num_sinks)
        is_sink_1S = slot_1S < self.num_sinks
        # The position that a slot takes next, from ``start`` on; a sink's slot takes but one.
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
            & (held_1S > position_R1 - self.window)
            & (slot_1S < self.num_slots)
        )
        return old_RS | (is_new_1S & sees_new_token(encoded_RA, offset_1S))

    def _around(self, distance: Any) -> Any:
        """Return a distance between two slots of the ring as one forwards."""
        return jnp.where(distance < 0, distance + self.capacity, distance)
