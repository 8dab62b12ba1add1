"""TriForce's retrieval cache (Sun et al., 2404.11912): the chunks of a long sequence that a query scores best.

For each layer and key/value head it copies whole chunks of keys and values from a dense cache: always the first chunk,
and those whose mean key scores best with the query. After them come the sequence's last tokens, the tail. Keys are
already rotated for their positions, so the order of the chunks does not matter.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.cache.interface import Placement, Scores, WholeCache
from jaxinfer.cache.slots import move_slots, path_moves, put_slots, slots_for
from jaxinfer.notation import DATA, PIPELINE, TENSOR, Array, Bool, Float, Int, Num
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_write import write_to_layer
from jaxinfer.ops.masks import visible_slots
from jaxinfer.ops.rows_in_bytes import by_head, from_heads, holds_bytes, to_numbers
from jaxinfer.ops.top_k import top_k


@partial(
    jax.tree_util.register_dataclass, data_fields=["keys", "values", "origin_B", "chosen_B"], meta_fields=["budget"]
)
@dataclass(frozen=True)
class RetrievalCache:
    """Keys and values ``[L, B, budget + tail, K*H]``: chosen chunks, then the sequence from position ``origin_B`` on.

    Of the first ``budget`` slots only ``chosen_B`` are in use. When the tokens from ``origin_B`` on no longer fit the
    tail, the chunks must be chosen again.
    """

    keys: Any
    values: Any
    origin_B: Any
    chosen_B: Any
    budget: int

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the tail; they attend to all chunks and, in the tail, as in a dense cache."""
        num_tokens, tail = ancestors_BTA.shape[-1], self.keys.shape[2] - self.budget
        behind_B = start_B - self.origin_B
        slots_BT = self.budget + behind_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        tail_BTS = visible_slots(behind_B, ancestors_BTA, tail)
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
        """Write the new tokens to the tail, then attend to the chunks and the tail."""
        new = keys_BTKH, values_BTKH
        keys, values = write_to_layer(self.keys, self.values, *new, layer, placement.slots_BT, backend)
        held = keys[layer], values[layer]
        rule = {**scores.rule, "num_kv_heads": keys_BTKH.shape[2]}
        mixed = attend(query_BTNH, *held, placement.mask_BTS, scores.scale, backend, **rule)
        return mixed, replace(self, keys=keys, values=values)

    def keep(
        self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]
    ) -> "RetrievalCache":
        """Move the path's slots to the left; slots past ``count_B`` do not change."""
        if path_BM.shape[1] == 1:
            return self
        first_B1 = (self.budget + start_B - self.origin_B)[:, None]
        from_BM, to_BM = (first_B1 + places_BM for places_BM in path_moves(path_BM, count_B))
        return replace(self, keys=move_slots(self.keys, from_BM, to_BM), values=move_slots(self.values, from_BM, to_BM))

    def refreshed(self, cache: WholeCache, positions_BM: Int[Array, "B M"]) -> "RetrievalCache":
        """Copy the tokens at these positions from the cache that holds the whole sequence, if they are in the tail."""
        behind_BM = positions_BM - self.origin_B[:, None]
        slots_BM = jnp.where(behind_BM >= 0, self.budget + behind_BM, self.keys.shape[2])
        keys, values = cache.read(positions_BM)
        return replace(self, keys=put_slots(self.keys, slots_BM, keys), values=put_slots(self.values, slots_BM, values))

    def rechosen(
        self,
        cache: WholeCache,
        queries_LBNH: Float[Array, "L B N H"],
        held_B: Int[Array, " B"],
        chunk: int,
        recent: int,
        backend: Backend,
        is_due: Bool[Array, ""] | bool = True,
        num_kv_heads: int | None = None,
    ) -> "RetrievalCache":
        """Choose the chunks by each layer's queries and copy them and the tail; change nothing if it is not due.

        ``held_B`` tokens are committed; at least the last ``recent`` of them stay in the tail. The cache may have more
        lanes than ``num_kv_heads`` heads use.
        """
        slots, lanes = self.keys.shape[2:]
        head_dim, in_bytes = queries_LBNH.shape[3], holds_bytes(self.keys.dtype)
        heads = num_kv_heads or lanes // head_dim
        used, shards = lanes if in_bytes else heads * head_dim, backend.kv_shards
        origin_B = jnp.maximum(held_B - recent, 0) // chunk * chunk
        num_chunks_B = origin_B // chunk
        tail_BS = origin_B[:, None] + jnp.arange(slots - self.budget)

        def copied(source_BSI: jax.Array, chosen_BKC: jax.Array) -> jax.Array:
            if not source_BSI.shape[-1]:  # values that are the keys
                return jnp.zeros((source_BSI.shape[0], slots, 0), source_BSI.dtype)
            if in_bytes:
                heads_BSKX = by_head(source_BSI, heads, head_dim, shards)
                return from_heads(_copied(heads_BSKX, chosen_BKC, chunk, tail_BS), lanes, shards)
            heads_BSKH = source_BSI.reshape(*source_BSI.shape[:2], heads, head_dim)
            return _copied(heads_BSKH, chosen_BKC, chunk, tail_BS).reshape(source_BSI.shape[0], -1, used)

        def choose_all(
            buffers: tuple[jax.Array, jax.Array],
            source: tuple[jax.Array, jax.Array],
            queries_LBNH: jax.Array,
            num_chunks_B: jax.Array,
            tail_BS: jax.Array,
            is_due: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            def choose(layer: Int[Array, ""], buffers: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                held = [rows_BSI[..., :used] for rows_BSI in cache.rows_of_layer(source, layer)]
                keys = to_numbers(held[0], heads, head_dim, shards, jnp.float32) if in_bytes else held[0]
                scores_BKC = chunk_scores(keys, queries_LBNH[layer], heads, chunk)
                index_C = jnp.arange(scores_BKC.shape[2])
                scores_BKC = jnp.where(index_C == 0, jnp.inf, scores_BKC)
                scores_BKC = jnp.where(index_C < num_chunks_B[:, None, None], scores_BKC, -jnp.inf)
                # A cache of fewer chunks than the budget is for leaves some of them unused.
                count = min(self.budget // chunk, scores_BKC.shape[2])
                _, chosen_BKC = top_k(scores_BKC, count, backend, (DATA, TENSOR))
                chosen_BKC = jnp.pad(chosen_BKC, ((0, 0), (0, 0), (0, self.budget // chunk - count)))
                keys_BSI, values_BSI = (copied(source_BSI, chosen_BKC) for source_BSI in held)
                return buffers[0].at[layer, ..., :used].set(keys_BSI), buffers[1].at[layer, ..., :used].set(values_BSI)

            # Zero iterations instead of a branch, which would hold both outcomes in memory; and one layer at a time.
            num_turns = jnp.where(is_due, queries_LBNH.shape[0], 0)
            return jax.lax.fori_loop(0, num_turns, choose, buffers)

        layers, whole = PartitionSpec(PIPELINE), PartitionSpec()
        run = backend.on_stages(choose_all, (layers, layers, layers, whole, whole, whole), layers)
        buffers, source = (self.keys, self.values), (cache.keys, cache.values)
        keys, values = run(buffers, source, queries_LBNH, num_chunks_B, tail_BS, jnp.asarray(is_due))
        chosen_B = jnp.minimum(num_chunks_B, self.budget // chunk) * chunk
        return RetrievalCache(
            keys,
            values,
            jnp.where(is_due, origin_B, self.origin_B),
            jnp.where(is_due, chosen_B, self.chosen_B),
            self.budget,
        )


def create_retrieval_cache(cache: WholeCache, budget: int, tail: int) -> RetrievalCache:
    """Return an empty retrieval cache for a cache of whole sequences, with a tail of at least ``tail`` slots."""
    batch = cache.batch
    shape, zero_B = (cache.keys.shape[0], batch, slots_for(budget + tail)), jnp.zeros((batch,), jnp.int32)
    keys, values = (jnp.zeros((*shape, each.shape[3]), each.dtype) for each in (cache.keys, cache.values))
    return RetrievalCache(keys, values, zero_B, jnp.zeros_like(zero_B), budget)


def chunk_scores(
    keys_BSI: Num[Array, "B S KH"], query_BNH: Float[Array, "B N H"], num_kv_heads: int, chunk: int
) -> Float[Array, "B K C"]:
    """Score each chunk of each key/value head: its mean key times the sum of the head's queries."""
    batch, slots, _ = keys_BSI.shape
    whole = slots // chunk
    keys_BCZKH = keys_BSI[:, : whole * chunk].reshape(batch, whole, chunk, num_kv_heads, -1)
    wide = jnp.promote_types(keys_BSI.dtype, jnp.float32)
    mean_BCKH = jnp.mean(keys_BCZKH, axis=2, dtype=wide)
    query_BKH = query_BNH.astype(wide).reshape(batch, num_kv_heads, -1, query_BNH.shape[2]).sum(axis=2)
    return jnp.einsum("BCKH,BKH->BKC", mean_BCKH, query_BKH, precision=jax.lax.Precision.HIGHEST)


def _copied(source_BSKH: jax.Array, chosen_BKC: jax.Array, chunk: int, tail_BS: jax.Array) -> jax.Array:
    """Return one layer's chosen chunks of each head, and after them the tail."""
    batch, slots, *heads = source_BSKH.shape
    whole, count = slots // chunk, chosen_BKC.shape[2]
    source_BCZKH = source_BSKH[:, : whole * chunk].reshape(batch, whole, chunk, *heads)

    def of_head(source_CZH: jax.Array, chosen_C: jax.Array) -> jax.Array:
        return source_CZH[chosen_C]

    chunks_BCZKH = jax.vmap(jax.vmap(of_head, in_axes=(2, 0), out_axes=2))(source_BCZKH, chosen_BKC)

    def of_tail(source_SKH: jax.Array, tail_S: jax.Array) -> jax.Array:
        return source_SKH.at[tail_S].get(mode="fill", fill_value=0)

    tail_BSKH = jax.vmap(of_tail)(source_BSKH, tail_BS)
    return jnp.concatenate([chunks_BCZKH.reshape(batch, count * chunk, *heads), tail_BSKH], axis=1)
