"""The paged cache: slots in pages that rows are given, share and return (PagedAttention, Kwon et al., 2309.06180).

Pages of all layers lie in one pool ``[L, P, Z, K*H]``. A table names the pages of each row, in the order of its slots.
Page 0 belongs to no row: what is written to it is dropped, so that a row without pages harms nobody. Who has which page
is decided on the host; the programs only follow the table.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.dense import place_in_order
from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.cache.page_places import page_places
from jaxinfer.cache.slots import empty_buffers, path_moves
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import attend_to_pages
from jaxinfer.ops.cache_write import as_rows
from jaxinfer.ops.masks import Window
from jaxinfer.ops.pages import copy_pages, move_in_pages, read_in_pages, write_in_pages


class Pool(NamedTuple):
    """The keys and values ``[L, P, Z, K*H]`` of the pages of all rows."""

    keys: Any
    values: Any


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "table_BX"], meta_fields=["window"])
@dataclass(frozen=True)
class PagedCache:
    """Keys and values ``[L, P, Z, K*H]``; slot s of row b is slot ``s % Z`` of page ``table_BX[b, s // Z]``.

    Rows may share pages that they only read. ``window`` is how far back a query attends; None means to all.
    """

    keys: Any
    values: Any
    table_BX: Any
    window: Window | None = None

    @property
    def page_size(self) -> int:
        """Z: the slots of a page."""
        return int(self.keys.shape[2])

    @property
    def num_slots(self) -> int:
        """The slots that a row can have."""
        return int(self.table_BX.shape[1]) * self.page_size

    @property
    def batch(self) -> int:
        """B: the number of rows."""
        return int(self.table_BX.shape[0])

    def place(
        self,
        start_B: Int[Array, " B"],
        ancestors_BTA: Bool[Array, "#B T A"],
        counts_B: Int[Array, " B"] | None = None,
        extent: int | None = None,
    ) -> Placement:
        """Place new tokens in the slots from ``start_B`` on; padding is written too, past the committed tokens."""
        return place_in_order(start_B, ancestors_BTA, counts_B, extent or self.num_slots, self.window)

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "PagedCache"]:
        """Write the new tokens, then attend to the slots of the placement's mask."""
        places = page_places(self.table_BX, placement.slots_BT, self.keys)
        keys, values = (
            write_in_pages(pool, layer, *places, as_rows(rows_BTKH, pool, backend))
            for pool, rows_BTKH in ((self.keys, keys_BTKH), (self.values, values_BTKH))
        )
        options = {**scores.rule, "window": self.window, "num_kv_heads": keys_BTKH.shape[2]}
        pages = keys, values, layer, self.table_BX
        mixed = attend_to_pages(query_BTNH, *pages, placement.seen, scores.scale, backend, **options)
        return mixed, replace(self, keys=keys, values=values)

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "PagedCache":
        """Move the path's slots to the left; slots past ``count_B`` do not change."""
        if path_BM.shape[1] == 1:
            return self
        slots = (start_B[:, None] + places_BM for places_BM in path_moves(path_BM, count_B))
        moves = [page_places(self.table_BX, slots_BM, self.keys) for slots_BM in slots]
        keys, values = (move_in_pages(pool, *moves) for pool in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def read(self, slots_BM: Int[Array, "B M"]) -> tuple[Array, Array]:
        """Return the keys and values ``[L, B, M, K*H]`` of slots of every layer; zeros for slots without a page."""
        places = page_places(self.table_BX, slots_BM, self.keys)
        return read_in_pages(self.keys, places), read_in_pages(self.values, places)

    def rows_of_layer(self, buffers: tuple[Array, Array], layer: Int[Array, ""] | int) -> tuple[Array, Array]:
        """Return a layer's keys and values ``[B, S, K*H]`` of all rows, from buffers laid out as the pools."""

        def gathered(pool: Array) -> Array:
            return pool[layer, self.table_BX].reshape(self.batch, self.num_slots, pool.shape[3])

        return gathered(buffers[0]), gathered(buffers[1])

    def forked(self, parents_B: Int[Array, " B"], held_B: Int[Array, " B"]) -> "PagedCache":
        """Let each row go on from the first ``held_B`` slots of another row, or of itself, of which as many are held.

        A row gets the other's full pages into its table. The page that is not full is copied to the row's own, and the
        pages after it stay the row's.
        """
        size, (num_pages, num_columns) = self.page_size, (self.keys.shape[1], self.table_BX.shape[1])
        full_B1 = (held_B // size)[:, None]
        theirs_BX = jnp.take(self.table_BX, parents_B, axis=0)
        table_BX = jnp.where(jnp.arange(num_columns) < full_B1, theirs_BX, self.table_BX)
        column_B1 = jnp.clip(full_B1, 0, num_columns - 1)
        source_B, own_B = (jnp.take_along_axis(each, column_B1, axis=1)[:, 0] for each in (theirs_BX, self.table_BX))
        is_copied_B = (held_B % size > 0) & (full_B1[:, 0] < num_columns) & (own_B > 0) & (source_B != own_B)
        target_B = jnp.where(is_copied_B, own_B, num_pages)
        keys, values = (copy_pages(pool, source_B, target_B) for pool in (self.keys, self.values))
        return replace(self, keys=keys, values=values, table_BX=table_BX)


def create_paged_cache(
    num_layers: int,
    num_pages: int,
    page_size: int,
    table_BX: Any,
    lanes: int,
    backend: Backend,
    window: Window | None,
    has_values: bool = True,
) -> PagedCache:
    """Return a pool of zeros of so many pages, page 0 included, and the rows' tables."""
    shape = (num_layers, num_pages, page_size, lanes)
    return PagedCache(*empty_buffers(shape, backend, has_values), jnp.asarray(table_BX, jnp.int32), window)


def even_table(batch: int, pages_per_row: int) -> np.ndarray:
    """Return the table of rows that have as many pages each, one row after the other, from page 1 on."""
    return 1 + np.arange(batch * pages_per_row, dtype=np.int32).reshape(batch, pages_per_row)
