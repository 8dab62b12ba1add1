"""What every cache layout promises to the decoder and to the decoding loop.

A row's committed tokens fill the cache in order; a forward pass writes its new tokens after them, sees the committed
ones and its own ancestors, and commits nothing: `keep` does. The laws that tests hold every layout to:

* attending equals attention over the concatenation of what was kept and what is new, inside the window;
* `keep` of a path equals having written just that path's tokens in order;
* rows never see each other, and what stands past a row's committed length never matters.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend


class Placement(NamedTuple):
    """Where the new tokens of one forward pass stand: computed once, used by every layer of a kind.

    ``slots_BT`` int32 are the cache slots written, past the end where a token is not to be kept; ``mask_BTS`` bool is
    what each token sees, over whatever the layout attends to. A layout that brings sinks nearer says in ``shift_BT``
    int32 by how many positions, for each new token; the decoder then rotates for texts without end, and adds the
    cosines and sines ``[B, T, R]`` of the shift as ``rotation`` (None without rotary positions). ``seen`` is what
    kernels read in the mask's place, where a layout has any.
    """

    slots_BT: Any
    mask_BTS: Any
    shift_BT: Any = None
    rotation: Any = None
    seen: Any = None

    def written_B(self, num_slots: int) -> Int[Array, " B"]:
        """Return how many tokens of each row are written into so many slots."""
        return jnp.sum(self.slots_BT < num_slots, axis=1, dtype=jnp.int32)


class Scores(NamedTuple):
    """How attention scores are made: times ``scale``, then bounded by ``softcap * tanh(score / softcap)`` if set."""

    scale: float
    softcap: float | None = None


@runtime_checkable
class Cache(Protocol):
    """Keys and values of all layers of one kind; an immutable pytree."""

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTT: Bool[Array, "#B T T"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place T new tokens after the first ``start_B`` committed ones.

        Only the first ``counts_B`` of a row are real (None, or T and more: all), what follows is padding. No slot from
        ``extent`` on holds anything yet (None: any may).
        """
        ...

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "Cache"]:
        """Write one layer's keys and values of the new tokens, and attend from these to what they see.

        ``layer`` counts the layers of this kind. One call does both, so that a layout is free to choose the order.
        """
        ...

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "Cache":
        """Commit the first ``count_B`` nodes of a path (indices of new tokens, ascending), contiguous from ``start_B``.

        The other new tokens are dropped, and a path that is all of them in order moves nothing; going back further
        than ``start_B`` needs no call, only a smaller start.
        """
        ...


class LayeredCache(NamedTuple):
    """The caches of a whole decoder: one part for each kind of layer, in the configuration's order of kinds."""

    parts: tuple[Cache, ...]

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTT: Bool[Array, "#B T T"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Placement, ...]:
        """Place new tokens in every part; see `Cache.place`."""
        return tuple(part.place(start_B, ancestors_BTT, counts_B, extent) for part in self.parts)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "LayeredCache":
        """Commit a path in every part; see `Cache.keep`."""
        return LayeredCache(tuple(part.keep(start_B, path_BM, count_B) for part in self.parts))

    def with_part(self, kind: int, part: Cache) -> "LayeredCache":
        """Return the cache with one part replaced."""
        return LayeredCache((*self.parts[:kind], part, *self.parts[kind + 1 :]))
