"""What every cache layout promises to the decoder and to the decoding loop.

A row's committed tokens fill the cache from its left end; a forward pass writes its new tokens after them, sees the
committed ones and its own ancestors, and commits nothing: `keep` does. The laws that tests hold every layout to:

* writing then attending equals attention over the concatenation of what was kept and what is new;
* `keep` of a path equals having written just that path's tokens in order;
* rows never see each other, and what stands past a row's committed length never matters.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend


class Placement(NamedTuple):
    """Where the new tokens of one forward pass stand: computed once, used by every layer.

    ``slots_BT`` int32 are the cache slots written; ``mask_BTS`` bool the slots each token sees.
    """

    slots_BT: Any
    mask_BTS: Any


@runtime_checkable
class Cache(Protocol):
    """Keys and values of all layers; an immutable pytree."""

    def place(
        self, start_B: Int[Array, " B"], ancestors_BTT: Bool[Array, "#B T T"], extent: int | None = None
    ) -> Placement:
        """Place T new tokens after the first ``start_B`` committed ones; read no more than ``extent`` slots."""
        ...

    def write(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
    ) -> "Cache":
        """Write one layer's keys and values of the new tokens."""
        ...

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        scale: float,
        backend: Backend,
    ) -> Float[Array, "B T N H"]:
        """Attend from the new tokens to what they see in one layer."""
        ...

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "Cache":
        """Commit the first ``count_B`` nodes of a path (indices of new tokens, ascending), contiguous from ``start_B``.

        The other new tokens are dropped; going back further than ``start_B`` needs no call, only a smaller start.
        """
        ...
