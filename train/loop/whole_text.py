"""A decoder over whole texts for training: every token attends to the earlier tokens of its text; no cache is kept.

With a written cache, the backward pass would keep a copy of it for each layer. Here each layer attends to the keys and
values of its own pass. So only activations are kept or, with ``Backend.remat_layers``, only the states between blocks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement, Scores
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, forward
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors, node_depths, visible_slots
from train.texts.batches import Batch


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["window"])
@dataclass(frozen=True)
class WholeText:
    """A cache (`jaxinfer.cache.interface.Cache`) without slots: new tokens attend only to each other."""

    window: int | None = None

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Return what each token attends to; ``start_B`` must be 0."""
        num_tokens = ancestors_BTA.shape[-1]
        slots_BT = start_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        return Placement(slots_BT, visible_slots(start_B, ancestors_BTA, num_tokens, self.window))

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


class PlacedText(NamedTuple):
    """The arguments of a forward pass over whole texts besides their tokens; see `Decoder.__call__`."""

    positions_BT: Any
    cache: LayeredCache
    placements: tuple[Placement, ...]
    lengths_B: Any


def place_text(config: DecoderConfig, tokens_BT: Int[Array, "B T"], segments_BT: Any = None) -> PlacedText:
    """Place texts, one or several per row.

    With ``segments_BT`` int32, tokens of one number are one text, whose positions count from its own start.
    """
    batch, num_tokens = tokens_BT.shape
    ancestors_BTT = causal_ancestors(num_tokens)[None]
    if segments_BT is not None:
        ancestors_BTT = ancestors_BTT & (segments_BT[:, :, None] == segments_BT[:, None, :])
    positions_BT = jnp.broadcast_to(node_depths(ancestors_BTT), tokens_BT.shape)
    cache = LayeredCache(tuple(WholeText(kind.window) for kind in config.kinds))
    placements = cache.place(jnp.zeros((batch,), jnp.int32), ancestors_BTT)
    return PlacedText(positions_BT, cache, placements, jnp.full((batch,), num_tokens, jnp.int32))


def text_hidden(
    decoder: Decoder, params: Params, tokens_BT: Int[Array, "B T"], segments_BT: Any = None
) -> Float[Array, "B T D"]:
    """Return the final normed hidden states of texts placed by `place_text`."""
    text = place_text(decoder.config, tokens_BT, segments_BT)
    hidden_BTD, _ = forward(decoder, params, tokens_BT, text.positions_BT, text.cache, text.placements, text.lengths_B)
    return hidden_BTD


class Predicted(NamedTuple):
    """For every token the next one, and whether it is predicted."""

    targets_BT: Any
    counts_BT: Any


def predicted(texts: Batch) -> Predicted:
    """Return the token after each token of a batch; a text's first token is never predicted."""
    tokens_BT, counts_BT = jnp.asarray(texts.tokens_BT), jnp.asarray(texts.mask_BT)
    targets_BT, counts_BT = jnp.roll(tokens_BT, -1, axis=1), jnp.roll(counts_BT, -1, axis=1).at[:, -1].set(False)
    if texts.segments_BT is not None:
        segments_BT = jnp.asarray(texts.segments_BT)
        counts_BT = counts_BT & (segments_BT == jnp.roll(segments_BT, -1, axis=1))
    return Predicted(targets_BT, counts_BT)
