"""Features: what chosen layers of the target read, for every token of a text, beside its keys and values.

Drafters such as EAGLE's (2503.01840) draft from them. A forward pass writes those of its new tokens, `keep` commits
them with the rest of the cache. So they are there after a prompt, of tokens that were accepted, for pages that texts
share, and for sequences that had to make room.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement
from jaxinfer.cache.page_places import page_places
from jaxinfer.cache.slots import path_moves
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.pages import move_in_pages, write_in_pages
from jaxinfer.ops.rows import set_in_rows, take_rows

# The channels of features are those of its layers, side by side.
_FIELDS = ["values", "table_BX"]


@partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=["layers"])
@dataclass(frozen=True)
class FeatureCache:
    """The hidden states before each of ``layers``, in this order side by side; the number of layers is after the last.

    ``values`` are ``[B, S, F]`` where slot s holds the token at position s or, with a table, pages ``[1, P, Z, F]`` as
    `jaxinfer.cache.paged` has them.
    """

    values: Any
    table_BX: Any
    layers: tuple[int, ...]

    def place(self, start_B: Int[Array, " B"], num_tokens: int) -> Placement:
        """Place new tokens in the slots from ``start_B`` on."""
        return Placement(start_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype), None)

    def write(self, placement: Placement, features_BTF: Float[Array, "B T F"]) -> "FeatureCache":
        """Write those of new tokens, where there is room for them."""
        features_BTF = features_BTF.astype(self.values.dtype)
        if self.table_BX is None:
            return replace(self, values=set_in_rows(self.values, placement.slots_BT, features_BTF))
        places = page_places(self.table_BX, placement.slots_BT, self.values)
        return replace(self, values=write_in_pages(self.values, 0, *places, features_BTF))

    def keep(self, start_B: Int[Array, " B"], path_BM: Int[Array, "B M"], count_B: Int[Array, " B"]) -> "FeatureCache":
        """Commit a path, as `jaxinfer.cache.interface.Cache.keep` does."""
        if path_BM.shape[1] == 1:
            return self
        from_BM, to_BM = (start_B[:, None] + places_BM for places_BM in path_moves(path_BM, count_B))
        if self.table_BX is None:
            return replace(self, values=set_in_rows(self.values, to_BM, take_rows(self.values, from_BM)))
        moves = (page_places(self.table_BX, slots_BM, self.values) for slots_BM in (from_BM, to_BM))
        return replace(self, values=move_in_pages(self.values, *moves))

    def read(self, slots_BT: Int[Array, "B T"], layers: tuple[int, ...]) -> Float[Array, "B T F"]:
        """Return what slots hold of some of the layers, in this order; slots that a row does not have give anything."""
        if self.table_BX is None:
            found_BTF = take_rows(self.values, jnp.clip(slots_BT, 0, self.values.shape[1] - 1))
        else:
            pages_BT, inner_BT = page_places(self.table_BX, slots_BT, self.values)
            found_BTF = self.values[0, jnp.minimum(pages_BT, self.values.shape[1] - 1), inner_BT]
        if layers == self.layers:
            return found_BTF
        by_layer = jnp.split(found_BTF, len(self.layers), axis=-1)
        return jnp.concatenate([by_layer[self.layers.index(layer)] for layer in layers], axis=-1)
