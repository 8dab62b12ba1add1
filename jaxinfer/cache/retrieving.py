"""The retrieving cache: keeps every token, of which each query reads some (by TriForce's rule, 2404.11912).

A query reads the first chunk of the text, the chunks whose mean key scores best with it, and the last tokens. It
chooses anew at every position, layer and key/value head, and from the text alone: a prompt's tokens choose as drawn
ones do, and a draft's node as the same token would. So a text is another one than with a dense cache, and the same
one by every strategy.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import place_in_order
from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.cache.layouts import RetrievalLayout
from jaxinfer.cache.slots import empty_buffers, move_slots, path_moves
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.attention import Layer, Partial, attend, attend_partially, values_of
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_write import as_rows
from jaxinfer.ops.cpu_kernels.attention import attends
from jaxinfer.ops.masks import node_depths
from jaxinfer.ops.rows import write_in_rows
from jaxinfer.ops.rows_in_bytes import holds_bytes, to_numbers


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "means"],
    meta_fields=["num_kv_heads", "budget", "chunk", "recent"],
)
@dataclass(frozen=True)
class RetrievingCache:
    """Keys and values ``[L, B*K, S, H]``, a row for each head of a text, so that each reads slots of its own.

    Slot ``s`` holds the token at position ``s``. ``means`` ``[L, B*K, S/chunk, H]``, float32 or wider, are the mean
    keys of chunks; those of chunks that reach into the last ``recent`` tokens are not to be read. A query reads at
    most ``budget`` slots of chunks, the last ``recent`` tokens, and those before them in the same chunk.
    """

    keys: Any
    values: Any
    means: Any
    num_kv_heads: int
    budget: int
    chunk: int
    recent: int

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the slots from ``start_B`` on; the mask is that of a dense cache."""
        return place_in_order(start_B, ancestors_BTA, counts_B, extent or self.keys.shape[2], None)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "RetrievingCache"]:
        """Write the new tokens, then attend from each to its chunks and to the last tokens."""
        slots_IT = jnp.repeat(placement.slots_BT, self.num_kv_heads, axis=0)
        keys, values = (
            write_in_rows(held, layer, slots_IT, as_rows(_by_head(new), held, backend)) if held.shape[3] else held
            for held, new in ((self.keys, keys_BTKH), (self.values, values_BTKH))
        )
        cache = replace(self, keys=keys, values=values)
        start_B, num_new = placement.seen.start_B, query_BTNH.shape[1]
        cache = cache._with_means(layer, start_B, num_new, query_BTNH.shape[3])
        position_BT = start_B[:, None] + node_depths(placement.seen.ancestors_BTT)
        origin_BT = jnp.maximum(position_BT + 1 - self.recent, 0) // self.chunk * self.chunk
        query_ITGH = _queries_by_head(query_BTNH, self.num_kv_heads)
        by_kernels = backend.cpu_kernels and attends(keys.dtype, query_BTNH.shape[3])
        read = cache._read_by_mask if by_kernels or placement.seen.counts_B is not None else cache._read_chunks
        mixed_BTNH = read(layer, placement, query_ITGH, jnp.repeat(origin_BT, self.num_kv_heads, 0), scores, backend)
        return mixed_BTNH.astype(backend.compute_dtype), cache

    def keep(
        self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]
    ) -> "RetrievingCache":
        """Move the path's slots to the left; slots past ``count_B`` do not change, and means come when they are due."""
        if path_BM.shape[1] == 1:
            return self
        from_IM, to_IM = (
            jnp.repeat(start_B[:, None] + places_BM, self.num_kv_heads, axis=0)
            for places_BM in path_moves(path_BM, count_B)
        )
        return replace(self, keys=move_slots(self.keys, from_IM, to_IM), values=move_slots(self.values, from_IM, to_IM))

    def _with_means(self, layer: Any, start_B: jax.Array, num_new: int, head_dim: int) -> "RetrievingCache":
        """Compute the mean keys of all chunks that new tokens, or the recent ones before them, stand in.

        A step writes at most ``recent`` tokens. So when a chunk is no longer recent, its mean is that of kept tokens.
        """
        layers, rows, slots, lanes = self.keys.shape
        first_B = jnp.maximum(start_B - self.recent, 0) // self.chunk
        chunk_BC = first_B[:, None] + jnp.arange((self.recent + num_new) // self.chunk + 2, dtype=first_B.dtype)
        at_IC = jnp.repeat(chunk_BC, self.num_kv_heads, axis=0)
        row_I1 = jnp.arange(rows)[:, None]
        chunks = self.keys.reshape(layers, rows, slots // self.chunk, self.chunk, lanes)
        held_ICZH = chunks.at[layer, row_I1, at_IC].get(mode="clip")
        if holds_bytes(held_ICZH.dtype):
            held_ICZH = to_numbers(held_ICZH, 1, head_dim, 1, jnp.float32)
        means_ICH = jnp.mean(held_ICZH[..., :head_dim], axis=2, dtype=self.means.dtype)
        return replace(self, means=self.means.at[layer, row_I1, at_IC].set(means_ICH, mode="drop"))

    def _chunk_scores(self, layer: Any, query_ITGH: jax.Array, origin_IT: jax.Array) -> jax.Array:
        """Return ``[B*K, T, C]``: the first chunk's is infinite, and that of one which is recent, or to come, too low.

        Sums are over one axis of products, so that no number of rows or queries changes the order of additions.
        """
        query_ITH = jnp.sum(query_ITGH.astype(self.means.dtype), axis=2)
        scores_ITC = jnp.sum(self.means[layer][:, None] * query_ITH[:, :, None], axis=-1)
        index_C = jnp.arange(scores_ITC.shape[2])
        scores_ITC = jnp.where(index_C == 0, jnp.inf, scores_ITC)
        return jnp.where((index_C + 1) * self.chunk <= origin_IT[..., None], scores_ITC, -jnp.inf)

    def _read_by_mask(
        self,
        layer: Any,
        placement: Placement,
        query_ITGH: jax.Array,
        origin_IT: jax.Array,
        scores: Scores,
        backend: Backend,
    ) -> jax.Array:
        """Attend where a mask says; the CPU kernels read nothing else."""
        mask_BTS = placement.mask_BTS
        extent = mask_BTS.shape[2]
        scores_ITC = self._chunk_scores(layer, query_ITGH, origin_IT)
        count = min(self.budget // self.chunk, scores_ITC.shape[2])
        # Chunks with equal scores are all read.
        least_IT1 = jax.lax.top_k(scores_ITC, count)[0][..., -1:]
        is_chosen_ITC = (scores_ITC >= least_IT1) & (scores_ITC > -jnp.inf)
        read_ITS = jnp.repeat(is_chosen_ITC, self.chunk, axis=2)[..., :extent]
        read_ITS |= jnp.arange(extent) >= origin_IT[..., None]
        mask_ITS = jnp.repeat(mask_BTS, self.num_kv_heads, axis=0) & read_ITS
        held = Layer(self.keys, layer, extent), Layer(self.values, layer, extent)
        options: Any = {"softcap": scores.softcap, "num_kv_heads": 1}
        return self._by_text(attend(query_ITGH, *held, mask_ITS, scores.scale, backend, **options))

    def _read_chunks(
        self,
        layer: Any,
        placement: Placement,
        query_ITGH: jax.Array,
        origin_IT: jax.Array,
        scores: Scores,
        backend: Backend,
    ) -> jax.Array:
        """Attend to copies of the chunks, each query to its own, and to the last tokens."""
        layers, rows, slots, lanes = self.keys.shape
        num_new, both = query_ITGH.shape[1], (self.keys, values_of(self.keys, self.values))
        scores_ITC = self._chunk_scores(layer, query_ITGH, origin_IT)
        best_ITX, chosen_ITX = jax.lax.top_k(scores_ITC, min(self.budget // self.chunk, scores_ITC.shape[2]))
        row_I1 = jnp.arange(rows)[:, None]
        near = self.recent + self.chunk + num_new
        first_B = jnp.maximum(placement.seen.start_B + 1 - self.recent, 0) // self.chunk * self.chunk
        slot_IW = jnp.repeat(first_B[:, None] + jnp.arange(near, dtype=first_B.dtype), self.num_kv_heads, axis=0)
        chunks, tails = [], []
        for buffer in both:
            by_chunk = buffer.reshape(layers, rows, slots // self.chunk, self.chunk, lanes)
            chunks.append(by_chunk[layer, row_I1[..., None], chosen_ITX].reshape(rows * num_new, -1, lanes))
            tails.append(buffer.at[layer, row_I1, slot_IW].get(mode="clip"))
        rule: Any = {"scale": scores.scale, "softcap": scores.softcap, "num_kv_heads": 1}
        run: Any = partial(attend_partially, backend=backend, **rule)
        is_chosen_ITS = jnp.repeat(best_ITX > -jnp.inf, self.chunk, axis=2).reshape(rows * num_new, 1, -1)
        each_query = query_ITGH.reshape(rows * num_new, 1, *query_ITGH.shape[2:])
        far = run(each_query, *chunks, is_chosen_ITS)
        far = Partial(*(part.reshape(rows, num_new, *part.shape[2:]) for part in far))
        mask_ITS = jnp.repeat(placement.mask_BTS, self.num_kv_heads, axis=0)
        at_ITW = jnp.broadcast_to(jnp.minimum(slot_IW, mask_ITS.shape[2] - 1)[:, None], (rows, num_new, near))
        mask_ITW = jnp.take_along_axis(mask_ITS, at_ITW, axis=2) & (slot_IW[:, None] < mask_ITS.shape[2])
        mask_ITW &= slot_IW[:, None] >= origin_IT[..., None]
        far, near = (
            Partial(*(self._by_text(field) for field in part)) for part in (far, run(query_ITGH, *tails, mask_ITW))
        )
        return far.joined_with(near).mean_BTNH()

    def _by_text(self, rows: jax.Array) -> jax.Array:
        """Return ``[B, T, N, ...]`` of ``[B*K, T, G, ...]``."""
        split = jnp.moveaxis(rows.reshape(-1, self.num_kv_heads, *rows.shape[1:]), 1, 2)
        return split.reshape(*split.shape[:2], -1, *split.shape[4:])


def _by_head(rows_BTKH: jax.Array) -> jax.Array:
    """Return ``[B*K, T, 1, H]``."""
    batch, num_new, heads, width = rows_BTKH.shape
    return jnp.moveaxis(rows_BTKH, 2, 1).reshape(batch * heads, num_new, 1, width)


def _queries_by_head(query_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Return ``[B*K, T, G, H]``: the queries that read a key/value head."""
    batch, num_new, _, width = query_BTNH.shape
    split_BTKGH = query_BTNH.reshape(batch, num_new, num_kv_heads, -1, width)
    return jnp.moveaxis(split_BTKGH, 2, 1).reshape(batch * num_kv_heads, num_new, -1, width)


def create_retrieving_cache(
    num_layers: int,
    batch: int,
    num_slots: int,
    num_kv_heads: int,
    head_dim: int,
    layout: RetrievalLayout,
    headroom: int,
    backend: Backend,
    has_values: bool = True,
) -> RetrievingCache:
    """Return a cache of zeros for ``batch`` rows of ``num_slots`` slots or a few more: whole chunks.

    Raises InvalidOption if steps of ``headroom`` tokens are longer than the last tokens that are read as they are.
    """
    if headroom > layout.recent:
        raise InvalidOption(
            f"cache retrieval: a step writes up to {headroom} tokens, more than recent={layout.recent}: choose a "
            "larger recent or a strategy that drafts less"
        )
    chunks = -(-num_slots // layout.chunk)
    shape = (num_layers, batch * num_kv_heads, chunks * layout.chunk, backend.cache_lanes(1, head_dim))
    wide = jnp.promote_types(jnp.float32 if holds_bytes(backend.cache_dtype) else backend.cache_dtype, jnp.float32)
    means = jnp.zeros((*shape[:2], chunks, head_dim), wide)
    keys, values = empty_buffers(shape, backend, has_values)
    return RetrievingCache(keys, values, means, num_kv_heads, layout.budget, layout.chunk, layout.recent)
