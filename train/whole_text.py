"""A decoder over whole texts, as training wants it: every token sees those before it in its own text, nothing is kept.

Writing into a cache layer after layer would have the backward pass keep a copy of the cache for each. Here each layer
attends to the keys and values of its own pass, so that only activations are kept, or with ``Backend.remat_layers``
only what passes between the blocks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement, Scores
from jaxinfer.models.decoder import Decoder, forward
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors, node_depths, visible_slots


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["window"])
@dataclass(frozen=True)
class WholeText:
    """A cache (`jaxinfer.cache.interface.Cache`) of no slots: new tokens see each other alone."""

    window: int | None = None

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTT: Bool[Array, "#B T T"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Say what each token sees; nothing stands before ``start_B``, which must be 0."""
        num_tokens = ancestors_BTT.shape[-1]
        slots_BT = start_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        return Placement(slots_BT, visible_slots(start_B, ancestors_BTT, num_tokens, self.window))

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "WholeText"]:
        """Attend among the new tokens."""
        keys, values = (array.reshape(*array.shape[:2], -1) for array in (keys_BTKH, values_BTKH))
        mixed = attend(query_BTNH, keys, values, placement.mask_BTS, scores.scale, backend, softcap=scores.softcap)
        return mixed, self

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "WholeText":
        """Keep nothing."""
        return self


def text_hidden(
    decoder: Decoder, params: Params, tokens_BT: Int[Array, "B T"], segments_BT: Any = None
) -> Float[Array, "B T D"]:
    """Return the final normed hidden states of texts, one a row, or several side by side.

    Where ``segments_BT`` int32 is given, tokens of one number are one text, whose positions count from its own start.
    """
    batch, num_tokens = tokens_BT.shape
    ancestors_BTT = causal_ancestors(num_tokens)[None]
    if segments_BT is not None:
        ancestors_BTT = ancestors_BTT & (segments_BT[:, :, None] == segments_BT[:, None, :])
    positions_BT = jnp.broadcast_to(node_depths(ancestors_BTT), tokens_BT.shape)
    cache = LayeredCache(tuple(WholeText(kind.window) for kind in decoder.config.kinds))
    placements = cache.place(jnp.zeros((batch,), jnp.int32), ancestors_BTT)
    lengths_B = jnp.full((batch,), num_tokens, jnp.int32)
    hidden_BTD, _ = forward(decoder, params, tokens_BT, positions_BT, cache, placements, lengths_B)
    return hidden_BTD
