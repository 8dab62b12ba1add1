"""What the blocks of one forward pass share, and what goes from one to the next."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.alibi import key_lanes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.positions import rotary_tables, sharpened, unbounded_tables
from jaxinfer.models.rope_frequencies import static_frequencies
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.once import computed_once

Carry = tuple[Float[Array, "B T D"], LayeredCache]


class Held(NamedTuple):
    """What a cache holds where it is not all layers: those from ``first`` on, each in ``count`` parts by rows.

    A forward pass runs on the rows of ``part``.
    """

    first: Any
    count: int
    part: Any

    def index(self, layer: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """Return where the rows of a layer stand among those held."""
        return (layer - self.first) * self.count + self.part


class Step(NamedTuple):
    """What every block of one forward pass shares, by kind of layer.

    ``rotations`` holds the cosines and sines ``[B, T, R]`` (None without rotary positions), ``placements`` the new
    tokens' places. ``held`` says what the caches hold; None is all layers. ``adapters_B`` says which loaded adapter
    each row has (`jaxinfer.models.adapters`); None is none anywhere. ``query_scales`` ``[B, T]`` multiply the queries
    of a kind (None: nothing does), ``key_lanes`` ``[B, T, N, P]`` are further lanes of keys (`jaxinfer.models.alibi`).
    """

    rotations: tuple[Any, ...]
    placements: tuple[Placement, ...]
    held: tuple[Held, ...] | None = None
    adapters_B: Any = None
    query_scales: tuple[Any, ...] = ()
    key_lanes: Any = None


def build_step(
    config: DecoderConfig,
    backend: Backend,
    positions_BT: Int[Array, "B T"],
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None = None,
) -> Step:
    """Compute what all blocks share in a forward pass of tokens at these positions."""
    dtype = jnp.dtype(backend.compute_dtype)
    rotations, placed, scales = [], [], []

    def kept(tables: Any) -> Any:
        return computed_once(tables, context_lengths_B, backend)

    for kind, placement in zip(config.kinds, placements, strict=True):
        if kind.rope is None:
            rotations.append(None)
        elif placement.shift_BT is None:
            rotations.append(kept(rotary_tables(kind.rope, positions_BT, context_lengths_B, dtype)))
        else:
            factor = static_frequencies(kind.rope)[1]
            cosines_BTR, sines_BTR = unbounded_tables(kind.rope, positions_BT, dtype)
            rotations.append(kept((cosines_BTR * factor, sines_BTR * factor)))
            placement = placement._replace(rotation=kept(unbounded_tables(kind.rope, placement.shift_BT, dtype)))
        placed.append(placement)
        scales.append(None if kind.sharpening is None else kept(sharpened(kind.sharpening, positions_BT, dtype)))
    lanes = kept(key_lanes(config, backend, positions_BT))
    return Step(tuple(rotations), tuple(placed), adapters_B=adapters_B, query_scales=tuple(scales), key_lanes=lanes)
