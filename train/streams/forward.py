"""Streams of chosen tokens of whole texts, computed as in inference (`jaxinfer.models.drafters.streams`).

The top layers run twice: over the texts, whose keys and values are kept, and then over the streams alone, which attend
to these. So if the weights are frozen, the backward pass goes only through the streams' few rows, not through the
texts.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache, Placement, Scores
from jaxinfer.models.drafters.streams import begin_streams
from jaxinfer.models.layers import index_in_kind
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from train.features.text_pass import Texts, place_texts, run_texts
from train.loop.whole_text import WholeText


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys_LBSE", "values_LBSE"],
    meta_fields=["window", "first", "is_kept"],
)
@dataclass(frozen=True, kw_only=True)
class TextKeys(WholeText):
    """Keys and values of texts in the top layers of one kind, after ``first`` layers of that kind; a cache for `Block`.

    At first, new tokens are the texts' and their keys are stored. Once it ``is_kept``, the stored keys are only read,
    and new tokens attend to them and to each other.
    """

    keys_LBSE: Any
    values_LBSE: Any
    first: int
    is_kept: bool = False

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "TextKeys"]:
        """Attend to the texts and the new tokens as the placement's mask allows."""
        cache, index = self, layer - self.first
        keys, values = (array.reshape(*array.shape[:2], -1) for array in (keys_BTKH, values_BTKH))
        if self.is_kept:
            keys = jnp.concatenate([self.keys_LBSE[index], keys], axis=1)
            values = jnp.concatenate([self.values_LBSE[index], values], axis=1)
        else:
            written = self.keys_LBSE.at[index].set(keys), self.values_LBSE.at[index].set(values)
            cache = replace(self, keys_LBSE=written[0], values_LBSE=written[1])
        mixed = attend(query_BTNH, keys, values, placement.mask_BTS, scores.scale, backend, softcap=scores.softcap)
        return mixed, cache


def run_top(
    model: Model, hidden_BTD: Float[Array, "B T D"], texts: Texts, num_layers: int
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run the last layers over texts; return the final normed states, and keys and values for the streams."""
    config, last = model.config, model.config.num_layers
    batch, num_tokens, _ = hidden_BTD.shape
    parts = []
    for kind in range(len(config.kinds)):
        places = (index_in_kind(config, layer) for layer in range(last - num_layers, last))
        own = [index for one, index in places if one == kind]
        shape = (len(own), batch, num_tokens, config.num_kv_heads * config.head_dim)
        empty = jnp.zeros(shape, model.decoder.backend.compute_dtype)
        parts.append(TextKeys(keys_LBSE=empty, values_LBSE=empty, first=min(own, default=0)))
    hidden_BTD, cache = run_texts(model, last - num_layers, last, hidden_BTD, texts, LayeredCache(tuple(parts)))
    kept = tuple(replace(part, is_kept=True) for part in cache.parts)  # pyright: ignore[reportArgumentType]
    return model.normed(hidden_BTD), LayeredCache(kept)


def stream_states(
    model: Model,
    stream_params: Params,
    num_layers: int,
    hidden_BTD: Float[Array, "B T D"],
    texts: Texts,
    cache: LayeredCache,
    picks_BP: Int[Array, "B P"],
) -> Float[Array, "B P J D"]:
    """Return the final normed states of the streams of tokens ``picks_BP``, given as places in their rows.

    ``hidden_BTD`` are the texts' states before the last layers and ``cache`` is `run_top`'s.
    """
    batch, num_picks = picks_BP.shape
    num_streams, last = stream_params["identifiers"].shape[0], model.config.num_layers
    picked_BPD = jnp.take_along_axis(hidden_BTD, picks_BP[..., None], axis=1)
    positions_BP = jnp.take_along_axis(texts.positions_BT, picks_BP, axis=1)
    positions_BPJ = positions_BP[..., None] + jnp.arange(1, num_streams + 1, dtype=positions_BP.dtype)
    rows_BPJD = begin_streams(stream_params, picked_BPD, model.decoder.backend).astype(hidden_BTD.dtype)
    rows_BRD, positions_BR = rows_BPJD.reshape(batch, -1, rows_BPJD.shape[-1]), positions_BPJ.reshape(batch, -1)
    relation_BRS = _stream_relation(texts.segments_BT, picks_BP, num_streams)
    keys_at_BS = jnp.concatenate([texts.positions_BT, positions_BR], axis=1)
    placements = place_texts(model.config, relation_BRS, positions_BR, keys_at_BS)
    lengths_B = jnp.full((batch,), hidden_BTD.shape[1], jnp.int32)
    rows_BRD, _ = model.run_layers(
        last - num_layers, last, rows_BRD, positions_BR, cache, placements, lengths_B, stream_params.get("blocks")
    )
    return model.normed(rows_BRD).reshape(batch, num_picks, num_streams, -1)


def _stream_relation(
    segments_BT: Int[Array, "B T"], picks_BP: Int[Array, "B P"], num_streams: int
) -> Bool[Array, "B R S"]:
    """Return what streams attend to in the texts and among themselves, pick by pick."""
    (batch, num_tokens), num_picks = segments_BT.shape, picks_BP.shape[1]
    own_BP1 = jnp.take_along_axis(segments_BT, picks_BP, axis=1)[..., None]
    seen_BPT = (segments_BT[:, None] == own_BP1) & (jnp.arange(num_tokens) <= picks_BP[..., None])
    earlier_RR = jnp.asarray(np.kron(np.eye(num_picks, dtype=bool), np.tri(num_streams, dtype=bool)))
    earlier_BRR = jnp.broadcast_to(earlier_RR, (batch, *earlier_RR.shape))
    return jnp.concatenate([jnp.repeat(seen_BPT, num_streams, axis=1), earlier_BRR], axis=2)
