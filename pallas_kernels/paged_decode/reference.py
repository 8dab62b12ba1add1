"""The reference of paged_decode, in plain JAX and float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.byte_rows import to_numbers
from pallas_kernels.flash_decode.reference import reference_attention
from pallas_kernels.window import Window


def reference_paged(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    layer: jax.Array | int,
    table_BX: jax.Array,
    start_B: jax.Array,
    *,
    ancestors_BTT: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: ArrayLike | None = None,
) -> jax.Array:
    """Gather the pages of every row, and attend to them."""

    def side_by_side(pages_LPZF: jax.Array) -> jax.Array:
        pages_PZF = pages_LPZF[layer]
        if pages_PZF.dtype == jnp.int8:
            assert num_kv_heads is not None
            pages_PZF = to_numbers(pages_PZF, num_kv_heads, query_BTNH.shape[-1])
        found = pages_PZF.astype(jnp.float32)[jnp.clip(table_BX, 0, pages_PZF.shape[0] - 1)]
        return found.reshape(1, table_BX.shape[0], -1, pages_PZF.shape[-1])

    keys, values = side_by_side(key_pages_LPZF), side_by_side(value_pages_LPZF)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window, "num_kv_heads": num_kv_heads}
    options["sink_logits_N"] = sink_logits_N
    return reference_attention(query_BTNH, keys, values, 0, start_B, ancestors_BTT, **options)
