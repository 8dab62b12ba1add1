"""A cache that records the queries of a forward pass, for choosing which tokens to keep."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "queries_LBTNH"], meta_fields=[])
@dataclass(frozen=True)
class RecordingCache:
    """Wraps any cache for one forward pass of T tokens and records their rotated queries in every layer."""

    cache: Any
    queries_LBTNH: Any

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens as the wrapped cache does."""
        return self.cache.place(start_B, ancestors_BTA, counts_B, extent)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "RecordingCache"]:
        """Record the queries of written tokens, then attend as the wrapped cache does."""
        is_written_BT11 = (placement.slots_BT < self.cache.num_slots)[..., None, None]
        recorded_BTNH = jnp.where(is_written_BT11, query_BTNH, self.queries_LBTNH[layer])
        queries_LBTNH = self.queries_LBTNH.at[layer].set(recorded_BTNH)
        mixed, cache = self.cache.attend(layer, placement, query_BTNH, keys_BTKH, values_BTKH, scores, backend)
        return mixed, RecordingCache(cache, queries_LBTNH)

    def keep(
        self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]
    ) -> "RecordingCache":
        """Commit a path in the wrapped cache."""
        return replace(self, cache=self.cache.keep(start_B, path_BM, count_B))
