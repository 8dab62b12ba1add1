"""Attention of a few new tokens per row, or of a token tree, to pages given by a table."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.ancestors import encode_ancestors
from pallas_kernels.block_attention import ScoreRule, check_sinks, spread_sinks
from pallas_kernels.byte_rows import ByteRows, check_rows
from pallas_kernels.head_groups import LANES, joined_heads, padded_rows
from pallas_kernels.paged_decode.arrangement import Arrangement, arrangement_of
from pallas_kernels.paged_decode.kernel import BLOCK_ROWS, Pages, attend_pages
from pallas_kernels.slot_order import DenseOrder
from pallas_kernels.tuning import tuned_blocks
from pallas_kernels.window import Window, widest

MAX_TOKENS = 128
PAGE_SIZES = (16, 32, 64, 128)
Described = jax.Array | jax.ShapeDtypeStruct


def paged_decode(
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
    block_slots: int | None = None,
    sink_logits_N: ArrayLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with T = 1 to 128 new tokens per row to pages of ``layer``, which already hold them: ``[B, T, N, H]``.

    A page of ``[L, P, Z, K*H]`` holds Z = 16, 32, 64 or 128 slots. ``table_BX[b, x]`` is the page of the slots x * Z to
    x * Z + Z - 1 of row b; rows may share pages. Only the entries of visible slots are read, clipped to 0..P-1. New
    token i of row b is in its slot ``start_B[b] + i``. It attends to all slots before ``start``, to itself and to its
    ancestors among the new tokens: ``ancestors_BTT[b, i, j]`` is true if j is i or an ancestor of i. One tree may serve
    all rows; None is a chain. A ``window`` keeps what it spans along a token's path. Starts are clipped to
    0..X * Z. Lanes after those of ``num_kv_heads`` heads must be zeros, fewer than 128.

    Pages of int8 hold rows in bytes (`byte_rows`). ``block_slots``, a multiple of 128, is how many slots are computed
    together (PagedAttention, 2309.06180). ``sink_logits_N`` are those of `flash_decode`.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"paged_decode takes 1 to {MAX_TOKENS} new tokens, not {tokens}")
    if ancestors_BTT is not None and ancestors_BTT.shape not in ((batch, tokens, tokens), (1, tokens, tokens)):
        raise ValueError(
            f"paged_decode: ancestors {ancestors_BTT.shape} of {batch} rows must be [B or 1, {tokens}, {tokens}]"
        )
    num_kv_heads = num_kv_heads or key_pages_LPZF.shape[3] // head_dim
    check_pages(
        "paged_decode", query_BTNH, key_pages_LPZF, value_pages_LPZF, table_BX, start_B, num_kv_heads, softcap, window
    )
    check_sinks("paged_decode", sink_logits_N, num_heads)
    page_size, width = key_pages_LPZF.shape[2:]
    num_slots = table_BX.shape[1] * page_size
    shape = paged_shape(query_BTNH, key_pages_LPZF, num_kv_heads)
    block = fit_block("paged_decode", block_slots or tuned_blocks("paged_decode", shape)["block_slots"], num_slots)
    joined = joined_heads(num_kv_heads, head_dim)
    repeats = joined * (num_heads // num_kv_heads)
    query, byte_rows = queries_for(query_BTNH, key_pages_LPZF, num_kv_heads, repeats // joined * tokens)
    width = byte_rows.lanes if byte_rows else width
    rows = padded_rows(repeats * tokens, 32 // query.dtype.itemsize, BLOCK_ROWS)
    start_B = jnp.clip(start_B.astype(jnp.int32), 0, num_slots)
    arrangement = arrangement_of(query, num_kv_heads, rows, width, interpreted=bool(interpret))
    mixed = attend_pages(
        arrangement.laid_out(query),
        [key_pages_LPZF, value_pages_LPZF],
        jnp.asarray(layer, jnp.int32),
        table_BX.astype(jnp.int32),
        start_B,
        encode_ancestors(
            ancestors_BTT, tokens, window, start_B=start_B, **mask_rows(tokens, repeats, rows, arrangement)
        ),
        spread_sinks(sink_logits_N, num_kv_heads // joined, tokens, rows, arrangement.beside),
        order=DenseOrder(tokens, num_slots, window),
        layout=Pages(page_size, block // page_size, num_kv_heads, rows, arrangement, byte_rows),
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        interpret=interpret,
    )
    return arrangement.taken_back(mixed).astype(query_BTNH.dtype)


def queries_for(
    query_BTNH: jax.Array, key_pages_LPZF: jax.Array, num_kv_heads: int, rows_per_head: int
) -> tuple[jax.Array, ByteRows | None]:
    """Return queries in the dtype of their products, and how rows in bytes are arranged, if pages have such."""
    if key_pages_LPZF.dtype != jnp.int8:
        return query_BTNH.astype(key_pages_LPZF.dtype), None
    return query_BTNH, ByteRows(num_kv_heads, query_BTNH.shape[3], key_pages_LPZF.shape[3], rows_per_head)


def mask_rows(tokens: int, repeats: int, rows: int, arrangement: Arrangement) -> dict[str, int]:
    """Return of which rows of a group a mask is needed, for `spread_tokens`: of one block if all blocks are alike."""
    beside = arrangement.beside
    alike = rows > BLOCK_ROWS and rows == repeats * tokens and BLOCK_ROWS % (beside * tokens) == 0
    own_rows = BLOCK_ROWS if alike else rows
    return {"repeats": BLOCK_ROWS // tokens if alike else repeats, "rows": own_rows, "beside": beside}


def paged_shape(
    query_BTNH: Described, key_pages_LPZF: Described, num_kv_heads: int | None = None
) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    tokens, num_heads, head_dim = query_BTNH.shape[1:]
    page_size, width = key_pages_LPZF.shape[2:]
    dtype = jnp.dtype(key_pages_LPZF.dtype).name
    shared: int = num_kv_heads or width // head_dim
    return {"T": tokens, "N": num_heads, "K": shared, "H": head_dim, "Z": page_size, "dtype": dtype}


def fit_block(kernel: str, block_slots: int, num_slots: int) -> int:
    """Return the slots of a block, no more than whole tiles of those that there are."""
    block = min(block_slots, -(-num_slots // LANES) * LANES)
    if block % LANES:
        raise ValueError(f"{kernel}: block_slots={block} is not a multiple of {LANES}")
    return block


def check_pages(
    kernel: str,
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    table_BX: jax.Array,
    start_B: jax.Array,
    num_kv_heads: int,
    softcap: float | None,
    window: Window | None,
) -> None:
    """Raise ValueError if shapes, dtypes or options do not match."""
    batch, _, num_heads, head_dim = query_BTNH.shape
    page_size, width = key_pages_LPZF.shape[2:]
    dtype = key_pages_LPZF.dtype
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{kernel}: pages of {page_size} slots are not supported: use one of {PAGE_SIZES}")
    if value_pages_LPZF.shape != key_pages_LPZF.shape or value_pages_LPZF.dtype != dtype:
        raise ValueError(f"{kernel}: keys {key_pages_LPZF.shape}, values {value_pages_LPZF.shape} must be alike")
    if dtype not in (jnp.bfloat16, jnp.float32, jnp.int8):
        raise ValueError(f"{kernel}: pages of {dtype} are not supported: use bfloat16, float32 or int8")
    if dtype == jnp.int8:
        check_rows(kernel, width, num_kv_heads, head_dim)
    elif num_kv_heads < 1 or num_heads % num_kv_heads or not 0 <= width - num_kv_heads * head_dim < LANES:
        raise ValueError(
            f"{kernel}: {num_heads} heads of {head_dim} do not share {num_kv_heads} in slots of {width} numbers"
        )
    if table_BX.ndim != 2 or table_BX.shape[0] != batch or start_B.shape != (batch,):
        raise ValueError(f"{kernel}: table {table_BX.shape} and starts {start_B.shape} are not of {batch} rows")
    if (window is not None and widest(window) < 1) or (softcap is not None and softcap <= 0):
        raise ValueError(f"{kernel}: window={window} must be at least 1, and softcap={softcap} above 0")
