"""The contract between cache layouts, the decoder and the decoding loop.

A row's committed tokens fill the cache in order. A forward pass writes its new tokens after them, attends to the
committed tokens and to its own ancestors, and commits nothing; `keep` does. Tests check these laws for every layout:

* attending equals attention over the concatenation of kept and new tokens, inside the window;
* `keep` of a path equals having written only that path's tokens in order;
* rows are independent, and slots past a row's committed length never matter.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend


class Placement(NamedTuple):
    """The places of the new tokens of one forward pass; computed once, used by every layer of a kind.

    ``slots_BT`` int32 are the cache slots to write; a slot past the end drops its token. ``mask_BTS`` bool marks, for
    each token, the slots or tokens that it attends to. A layout that moves its sinks closer gives the number of
    positions for each new token in ``shift_BT`` int32. The decoder then rotates for unbounded sequences, and adds the
    cosines and sines ``[B, T, R]`` of the shift as ``rotation`` (None without rotary positions). ``seen`` is what
    kernels read instead of the mask, if the layout has it.
    """

    slots_BT: Any
    mask_BTS: Any
    shift_BT: Any = None
    rotation: Any = None
    seen: Any = None

    def written_B(self, num_slots: int) -> Int[Array, " B"]:
        """Return how many tokens of each row are written to a cache of ``num_slots`` slots."""
        return jnp.sum(self.slots_BT < num_slots, axis=1, dtype=jnp.int32)


class Scores(NamedTuple):
    """How to compute attention scores: times ``scale``, then ``softcap * tanh(score / softcap)`` if set.

    ``sink_logits_N`` are scores that no slot has, one of each head, if there are any: they take a part of the weights.
    """

    scale: float
    softcap: float | None = None
    sink_logits_N: Any = None

    @property
    def rule(self) -> dict[str, Any]:
        """All but the scale, as options of what attends."""
        return {"softcap": self.softcap, "sink_logits_N": self.sink_logits_N}


@runtime_checkable
class Cache(Protocol):
    """Keys and values of all layers of one kind; an immutable pytree."""

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place T new tokens after the first ``start_B`` committed ones.

        Only the first ``counts_B`` of a row are real (None, or T and more: all), the rest is padding. Slots from
        ``extent`` on are still empty (None: any slot may be in use). Where a slot's number is its token's position, a
        tree may come in several passes: of A tokens, which stand from ``start_B`` on, the last T are then new.
        Elsewhere A is T.
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
        """Write one layer's keys and values of the new tokens, and attend from these.

        ``layer`` counts the layers of this kind. One call does both, so that each layout can choose the order.
        """
        ...

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "Cache":
        """Commit the first ``count_B`` nodes of a path (indices of new tokens, ascending), contiguous from ``start_B``.

        The other new tokens are dropped. A path of all new tokens in order moves nothing. Going back further than
        ``start_B`` needs no call, only a smaller start.
        """
        ...


@runtime_checkable
class WholeCache(Cache, Protocol):
    """A cache that holds every token of its rows, where caches that hold some of them copy from.

    ``keys`` and ``values`` have a layer first and lanes last.
    """

    keys: Any
    values: Any

    @property
    def num_slots(self) -> int:
        """How many slots a row can have."""
        ...

    @property
    def batch(self) -> int:
        """How many rows there are."""
        ...

    def read(self, slots_BM: Int[Array, "B M"]) -> tuple[Array, Array]:
        """Return the keys and values ``[L, B, M, K*H]`` of slots of every layer; zeros for slots past the end."""
        ...

    def rows_of_layer(self, buffers: tuple[Array, Array], layer: Int[Array, ""] | int) -> tuple[Array, Array]:
        """Return a layer's keys and values ``[B, S, K*H]`` of all rows, from buffers laid out as the cache's."""
        ...


class LayeredCache(NamedTuple):
    """The caches of a whole decoder: one part for each kind of layer, in the config's order of kinds.

    ``features`` is a `jaxinfer.cache.features.FeatureCache` where a drafter reads it, else None.
    """

    parts: tuple[Cache, ...]
    features: Any = None

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Placement, ...]:
        """Place new tokens in every part, and last in the features, if there are any; see `Cache.place`."""
        placements = tuple(part.place(start_B, ancestors_BTA, counts_B, extent) for part in self.parts)
        if self.features is None:
            return placements
        num_new, num_tokens = ancestors_BTA.shape[1:]
        return *placements, self.features.place(start_B + num_tokens - num_new, num_new)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "LayeredCache":
        """Commit a path in every part; see `Cache.keep`."""
        parts = tuple(part.keep(start_B, path_BM, count_B) for part in self.parts)
        return LayeredCache(parts, self.features and self.features.keep(start_B, path_BM, count_B))

    def with_part(self, kind: int, part: Cache) -> "LayeredCache":
        """Return the cache with one part replaced."""
        return self._replace(parts=(*self.parts[:kind], part, *self.parts[kind + 1 :]))
