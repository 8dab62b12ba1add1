"""The cropped cache: the last block of a text, for models whose learned positions end (as nanoGPT crops its context).

Such a model knows no position past its context. A text that outgrows it goes on from its last tokens, which are read
as a text of their own: prefilled again, at positions from 0 on (`jaxinfer.decoding.cropping`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend


@partial(jax.tree_util.register_dataclass, data_fields=["block", "begin_B"], meta_fields=[])
@dataclass(frozen=True)
class CroppedCache:
    """A dense cache of the tokens of each row from position ``begin_B`` on, int32; those before are forgotten."""

    block: DenseCache
    begin_B: Any

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens of a text in its block; ``extent`` is of slots."""
        return self.block.place(start_B - self.begin_B, ancestors_BTA, counts_B, extent)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "CroppedCache"]:
        """Attend inside the block."""
        new = query_BTNH, keys_BTKH, values_BTKH
        mixed_BTNH, block = self.block.attend(layer, placement, *new, scores, backend)
        return mixed_BTNH, replace(self, block=block)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "CroppedCache":
        """Commit a path in the block."""
        return replace(self, block=self.block.keep(start_B - self.begin_B, path_BM, count_B))


def create_cropped_cache(block: DenseCache) -> CroppedCache:
    """Return a cache whose rows begin with their texts."""
    return CroppedCache(block, jnp.zeros((block.batch,), jnp.int32))
