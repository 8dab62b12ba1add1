"""Where a row's slots stand in a pool of pages."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Int


def page_places(
    table_BX: Int[Array, "B X"], slots_BT: Int[Array, "B T"], pool_LPZF: jax.Array
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Return the page of each slot, and its place there; past the last page for slots that a row does not have."""
    pages, size = pool_LPZF.shape[1:3]
    column_BT = jnp.clip(slots_BT // size, 0, table_BX.shape[1] - 1)
    page_BT = jnp.take_along_axis(table_BX, column_BT, axis=1)
    is_held_BT = (slots_BT >= 0) & (slots_BT < table_BX.shape[1] * size) & (page_BT > 0)
    return jnp.where(is_held_BT, page_BT, pages), slots_BT % size
