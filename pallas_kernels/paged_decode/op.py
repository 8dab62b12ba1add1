"""Attention of a few new tokens per row to pages given by a table."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ancestors import encode_ancestors
from pallas_kernels.block_attention import ScoreRule
from pallas_kernels.head_groups import LANES, gather_heads, joined_heads, padded_rows, spread_queries
from pallas_kernels.paged_decode.kernel import BLOCK_ROWS, Pages, attend_pages
from pallas_kernels.slot_order import DenseOrder
from pallas_kernels.tuning import tuned_blocks

MAX_TOKENS = 8
PAGE_SIZES = (16, 32, 64, 128)
Described = jax.Array | jax.ShapeDtypeStruct


def paged_decode(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    layer: jax.Array | int,
    table_BX: jax.Array,
    start_B: jax.Array,
    key_scales_LPKZ: jax.Array | None = None,
    value_scales_LPKZ: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    block_slots: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with T = 1 to 8 new tokens per row to pages of ``layer``, which already hold them: ``[B, T, N, H]``.

    A page of ``[L, P, Z, K*H]`` holds Z = 16, 32, 64 or 128 slots. ``table_BX[b, x]`` is the page of the slots x * Z to
    x * Z + Z - 1 of row b; rows may share pages. Only the entries of visible slots are read, clipped to 0..P-1. New
    token i of row b is in its slot ``start_B[b] + i`` and attends to all slots up to its own, or to the last
    ``window``. Starts are clipped to 0..X * Z.

    Pages of int8 have a float32 scale for every slot and head: ``[L, P, K, Z]``, or ``[L, P, K, 128]`` with anything
    past Z. XLA lays out fewer than 128 lanes in another order and copies them for the kernel. ``block_slots``, a
    multiple of 128, is how many slots are computed together (PagedAttention, 2309.06180).
    """
    _check(query_BTNH, key_pages_LPZF, value_pages_LPZF, table_BX, start_B, key_scales_LPKZ, value_scales_LPKZ)
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"paged_decode: window={window} must be at least 1, and softcap={softcap} above 0")
    _, tokens, num_heads, head_dim = query_BTNH.shape
    page_size, width = key_pages_LPZF.shape[2:]
    num_kv_heads = width // head_dim
    num_slots = table_BX.shape[1] * page_size
    block = block_slots or tuned_blocks("paged_decode", paged_shape(query_BTNH, key_pages_LPZF))["block_slots"]
    block = min(block, -(-num_slots // LANES) * LANES)
    if block % LANES:
        raise ValueError(f"paged_decode: block_slots={block} is not a multiple of {LANES}")
    scales = [] if key_scales_LPKZ is None or value_scales_LPKZ is None else [key_scales_LPKZ, value_scales_LPKZ]
    query_dtype = query_BTNH.dtype if scales else key_pages_LPZF.dtype
    joined = joined_heads(num_kv_heads, head_dim)
    rows_per_head = num_heads // num_kv_heads * tokens
    rows = padded_rows(joined * rows_per_head, 32 // jnp.dtype(query_dtype).itemsize, BLOCK_ROWS)
    mixed_BCRI = attend_pages(
        spread_queries(query_BTNH.astype(query_dtype), num_kv_heads, rows, width),
        [key_pages_LPZF, value_pages_LPZF, *scales],
        jnp.asarray(layer, jnp.int32),
        table_BX.astype(jnp.int32),
        jnp.clip(start_B.astype(jnp.int32), 0, num_slots),
        encode_ancestors(None, tokens, window, joined * (num_heads // num_kv_heads), rows),
        order=DenseOrder(tokens, num_slots, window),
        layout=Pages(page_size, block // page_size, num_kv_heads, rows_per_head, bool(scales)),
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        interpret=interpret,
    )
    return gather_heads(mixed_BCRI, tokens, num_heads, num_kv_heads, head_dim).astype(query_BTNH.dtype)


def paged_shape(query_BTNH: Described, key_pages_LPZF: Described) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    tokens, num_heads, head_dim = query_BTNH.shape[1:]
    page_size, width = key_pages_LPZF.shape[2:]
    dtype = jnp.dtype(key_pages_LPZF.dtype).name
    return {"T": tokens, "N": num_heads, "K": width // head_dim, "H": head_dim, "Z": page_size, "dtype": dtype}


def _check(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    table_BX: jax.Array,
    start_B: jax.Array,
    key_scales_LPKZ: jax.Array | None,
    value_scales_LPKZ: jax.Array | None,
) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    layers, pages, page_size, width = key_pages_LPZF.shape
    dtype = key_pages_LPZF.dtype
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"paged_decode takes 1 to {MAX_TOKENS} new tokens, not {tokens}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"paged_decode: pages of {page_size} slots are not supported: use one of {PAGE_SIZES}")
    if value_pages_LPZF.shape != key_pages_LPZF.shape or value_pages_LPZF.dtype != dtype:
        raise ValueError(f"paged_decode: keys {key_pages_LPZF.shape}, values {value_pages_LPZF.shape} must be alike")
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.int8):
        raise ValueError(f"paged_decode: pages of {dtype} are not supported: use bfloat16, float32 or int8")
    if width % head_dim or num_heads % (width // head_dim):
        raise ValueError(f"paged_decode: {num_heads} heads of {head_dim} do not share slots of {width} numbers evenly")
    if table_BX.ndim != 2 or table_BX.shape[0] != batch or start_B.shape != (batch,):
        raise ValueError(f"paged_decode: table {table_BX.shape} and starts {start_B.shape} are not of {batch} rows")
    expected = (layers, pages, width // head_dim)
    for scales in (key_scales_LPKZ, value_scales_LPKZ):
        if (scales is None) != (dtype != jnp.int8):
            raise ValueError(f"paged_decode: int8 pages, and no others, have scales: these are {dtype}")
        if scales is not None and (scales.shape[:3] != expected or scales.shape[3] not in (page_size, LANES)):
            raise ValueError(f"paged_decode: scales {scales.shape} must be {(*expected, page_size)}, or {LANES} wide")
