"""The reference of paged_decode, in plain JAX and float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_decode.reference import reference_attention


def reference_paged(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    layer: jax.Array | int,
    table_BX: jax.Array,
    start_B: jax.Array,
    key_scales_LPKZ: jax.Array | None = None,
    value_scales_LPKZ: jax.Array | None = None,
    *,
    ancestors_BTT: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    num_kv_heads: int | None = None,
) -> jax.Array:
    """Gather the pages of every row, multiply by their scales, and attend to them."""
    head_dim = query_BTNH.shape[-1]

    def side_by_side(pages_LPZF: jax.Array, scales_LPKZ: jax.Array | None) -> jax.Array:
        pages_PZF = pages_LPZF[layer].astype(jnp.float32)
        if scales_LPKZ is not None:
            scales_PZK = scales_LPKZ[layer, ..., : pages_PZF.shape[1]].transpose(0, 2, 1)
            pages_PZF = pages_PZF * jnp.repeat(scales_PZK, head_dim, axis=-1)
        found = pages_PZF[jnp.clip(table_BX, 0, pages_PZF.shape[0] - 1)]
        return found.reshape(1, table_BX.shape[0], -1, pages_PZF.shape[-1])

    keys, values = side_by_side(key_pages_LPZF, key_scales_LPKZ), side_by_side(value_pages_LPZF, value_scales_LPKZ)
    options = {"scale": scale, "softcap": softcap, "window": window, "num_kv_heads": num_kv_heads}
    return reference_attention(query_BTNH, keys, values, 0, start_B, ancestors_BTT, **options)
