"""The retrieval cache of TriForce (Sun et al., 2404.11912): the chunks of a long text that a query asks for.

Keys and values of whole chunks are copied from a dense cache, for each layer and each key/value head those whose mean
key the query scores best, the first chunk always. Behind them stands the end of the text, token by token. Keys are
rotated for their place in the text already, so in which order they stand does not matter.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.cache.slots import move_slots, path_moves, write_slots
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import visible_slots


@partial(
    jax.tree_util.register_dataclass, data_fields=["keys", "values", "origin_B", "chosen_B"], meta_fields=["budget"]
)
@dataclass(frozen=True)
class RetrievalCache:
    """Keys and values ``[L, B, budget + tail, K*H]``: chosen chunks, then the text from position ``origin_B`` on.

    Of the first ``budget`` slots only ``chosen_B`` hold something. A text outgrows it where its end, counted from
    ``origin_B``, outgrows the tail: then chunks are to be chosen anew.
    """

    keys: Any
    values: Any
    origin_B: Any
    chosen_B: Any
    budget: int

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTT: Bool[Array, "#B T T"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the tail; they see all chunks and, of the tail, what a dense cache would show them."""
        num_tokens, tail = ancestors_BTT.shape[-1], self.keys.shape[2] - self.budget
        behind_B = start_B - self.origin_B
        slots_BT = self.budget + behind_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        tail_BTS = visible_slots(behind_B, ancestors_BTT, tail)
        is_chosen_BS = jnp.arange(self.budget) < self.chosen_B[:, None]
        chosen_BTS = jnp.broadcast_to(is_chosen_BS[:, None], (*tail_BTS.shape[:2], self.budget))
        return Placement(slots_BT, jnp.concatenate([chosen_BTS, tail_BTS], axis=-1))

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "RetrievalCache"]:
        """Write the new tokens to the tail, then attend to it and to the chunks."""
        keys = write_slots(self.keys, layer, placement.slots_BT, keys_BTKH)
        values = write_slots(self.values, layer, placement.slots_BT, values_BTKH)
        held = keys[layer], values[layer]
        mixed = attend(query_BTNH, *held, placement.mask_BTS, scores.scale, backend, softcap=scores.softcap)
        return mixed, replace(self, keys=keys, values=values)

    def keep(
        self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]
    ) -> "RetrievalCache":
        """Move the path's slots to the left; those past ``count_B`` keep what they held."""
        if path_BM.shape[1] == 1:
            return self
        first_B1 = (self.budget + start_B - self.origin_B)[:, None]
        from_BM, to_BM = (first_B1 + places_BM for places_BM in path_moves(path_BM, count_B))
        return replace(self, keys=move_slots(self.keys, from_BM, to_BM), values=move_slots(self.values, from_BM, to_BM))

    def with_tail(self, cache: DenseCache) -> "RetrievalCache":
        """Copy the tail from a dense cache of the text: what other tokens than the committed ones wrote is undone."""
        place_BS = self.origin_B[:, None] + jnp.arange(self.keys.shape[2] - self.budget)
        rows_B1 = jnp.arange(place_BS.shape[0])[:, None]

        def renewed(buffer: jax.Array, source: jax.Array) -> jax.Array:
            tail = source.at[:, rows_B1, place_BS].get(mode="fill", fill_value=0)
            return buffer.at[:, :, self.budget :].set(tail)

        return replace(self, keys=renewed(self.keys, cache.keys), values=renewed(self.values, cache.values))


def retrieve(
    cache: DenseCache,
    queries_LBNH: Float[Array, "L B N H"],
    held_B: Int[Array, " B"],
    chunk: int,
    budget: int,
    recent: int,
    tail: int,
) -> RetrievalCache:
    """Choose the chunks of ``budget`` tokens by each layer's queries; the tail of as many slots is still to be copied.

    ``held_B`` tokens are committed, of which at least the last ``recent`` are left to the tail.
    """
    num_kv_heads = cache.keys.shape[3] // queries_LBNH.shape[3]
    origin_B = jnp.maximum(held_B - recent, 0) // chunk * chunk
    num_chunks_B = origin_B // chunk

    def choose(layer: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        keys_BSI, values_BSI, query_BNH = layer
        scores_BKC = chunk_scores(keys_BSI, query_BNH, num_kv_heads, chunk)
        index_C = jnp.arange(scores_BKC.shape[2])
        scores_BKC = jnp.where(index_C == 0, jnp.inf, scores_BKC)
        scores_BKC = jnp.where(index_C < num_chunks_B[:, None, None], scores_BKC, -jnp.inf)
        _, chosen_BKC = jax.lax.top_k(scores_BKC, budget // chunk)
        return _copied(keys_BSI, chosen_BKC, chunk, tail), _copied(values_BSI, chosen_BKC, chunk, tail)

    # One layer at a time: the mean keys of all at once would take as much memory as a part of the cache.
    keys, values = jax.lax.map(choose, (cache.keys, cache.values, queries_LBNH))
    chosen_B = jnp.minimum(num_chunks_B, budget // chunk) * chunk
    return RetrievalCache(keys, values, origin_B, chosen_B, budget)


def chunk_scores(
    keys_BSI: Float[Array, "B S KH"], query_BNH: Float[Array, "B N H"], num_kv_heads: int, chunk: int
) -> Float[Array, "B K C"]:
    """Score each chunk of each key/value head: its mean key times the sum of the head's queries."""
    batch, slots, _ = keys_BSI.shape
    whole = slots // chunk
    keys_BCZKH = keys_BSI[:, : whole * chunk].reshape(batch, whole, chunk, num_kv_heads, -1)
    wide = jnp.promote_types(keys_BSI.dtype, jnp.float32)
    mean_BCKH = jnp.mean(keys_BCZKH, axis=2, dtype=wide)
    query_BKH = query_BNH.astype(wide).reshape(batch, num_kv_heads, -1, query_BNH.shape[2]).sum(axis=2)
    return jnp.einsum("BCKH,BKH->BKC", mean_BCKH, query_BKH, precision=jax.lax.Precision.HIGHEST)


def _copied(source_BSI: jax.Array, chosen_BKC: jax.Array, chunk: int, tail: int) -> jax.Array:
    """Return the chosen chunks of every head side by side ``[B, budget + tail, K*H]``, with an empty tail."""
    batch, slots, lanes = source_BSI.shape
    num_kv_heads, count = chosen_BKC.shape[1:]
    whole = slots // chunk
    source_BCZKH = source_BSI[:, : whole * chunk].reshape(batch, whole, chunk, num_kv_heads, -1)

    def of_head(source_CZH: jax.Array, chosen_C: jax.Array) -> jax.Array:
        return source_CZH[chosen_C]

    chunks_BCZKH = jax.vmap(jax.vmap(of_head, in_axes=(2, 0), out_axes=2))(source_BCZKH, chosen_BKC)
    return jnp.pad(chunks_BCZKH.reshape(batch, count * chunk, lanes), ((0, 0), (0, tail), (0, 0)))
