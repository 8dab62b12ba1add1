"""The reference of paged_prefill, in plain JAX and float32."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.flash_prefill.reference import reference_prefill
from pallas_kernels.window import Window


def reference_chunk(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    layer: jax.Array | int,
    table_BX: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: ArrayLike | None = None,
) -> jax.Array:
    """Gather the pages of every row and attend to them."""
    lanes = None if num_kv_heads is None else num_kv_heads * query_BTNH.shape[-1]

    def side_by_side(pages_LPZF: jax.Array) -> jax.Array:
        found = pages_LPZF[layer, jnp.clip(table_BX, 0, pages_LPZF.shape[1] - 1), :, :lanes]
        return found.reshape(1, table_BX.shape[0], -1, found.shape[-1])

    keys, values = side_by_side(key_pages_LPZF), side_by_side(value_pages_LPZF)
    query = query_BTNH.astype(key_pages_LPZF.dtype)
    options = {"scale": scale, "softcap": softcap, "window": window}
    mixed_BTNH = reference_prefill(query, keys, values, 0, start_B, length_B, sink_logits_N=sink_logits_N, **options)
    return mixed_BTNH.astype(query_BTNH.dtype)
