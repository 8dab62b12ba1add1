"""Causal attention of a chunk of a prompt to pages given by a table."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.ancestors import encode_places
from pallas_kernels.block_attention import ScoreRule, check_sinks, spread_sinks
from pallas_kernels.head_groups import joined_heads, padded_rows
from pallas_kernels.paged_decode.arrangement import arrangement_of
from pallas_kernels.paged_decode.kernel import BLOCK_ROWS, Pages, attend_pages
from pallas_kernels.paged_decode.op import check_pages, fit_block, mask_rows, paged_shape, queries_for
from pallas_kernels.slot_order import ChainOrder
from pallas_kernels.tuning import tuned_blocks
from pallas_kernels.window import Window

KERNEL = "paged_prefill"
# The most bytes of a block of queries: with them their sums, six times as large, stay on the chip.
_MOST_BYTES = 4 << 20


def paged_prefill(
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
    block_q: int | None = None,
    block_slots: int | None = None,
    sink_logits_N: ArrayLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with T new tokens per row to pages of ``layer``, which already hold them: ``[B, T, N, H]``.

    Token t of row b is in slot ``start_B[b] + t`` and attends to all slots up to its own, or those in its ``window``.
    ``length_B`` is the number of a row's real tokens, 0 to T (None: T); the others give zeros. The other arguments are
    those of `paged_decode`. Blocks are ``block_q`` tokens by ``block_slots`` slots: a row's pages are
    read once for each block of its tokens that holds a real one.
    """
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    num_kv_heads = num_kv_heads or key_pages_LPZF.shape[3] // head_dim
    check_pages(KERNEL, query_BTNH, key_pages_LPZF, value_pages_LPZF, table_BX, start_B, num_kv_heads, softcap, window)
    check_sinks(KERNEL, sink_logits_N, num_heads)
    page_size, width = key_pages_LPZF.shape[2:]
    num_slots = table_BX.shape[1] * page_size
    if block_q is None or block_slots is None:
        tuned = tuned_blocks(KERNEL, paged_shape(query_BTNH, key_pages_LPZF, num_kv_heads))
        block_q, block_slots = block_q or tuned["block_q"], block_slots or tuned["block_slots"]
    joined = joined_heads(num_kv_heads, head_dim)
    repeats = joined * (num_heads // num_kv_heads)
    itemsize = (query_BTNH if key_pages_LPZF.dtype == jnp.int8 else key_pages_LPZF).dtype.itemsize
    # Sinks, spread over lanes, stand beside the sums.
    most_bytes = _MOST_BYTES if sink_logits_N is None else _MOST_BYTES // 2
    most = max(most_bytes // (repeats * width * itemsize) // 16, 1) * 16
    block_q = min(block_q, most, tokens)
    parts = -(-tokens // block_q)
    rows = padded_rows(repeats * block_q, 32 // itemsize, BLOCK_ROWS)
    block = fit_block(KERNEL, block_slots, num_slots)

    # Each block of tokens is a row of the kernel's.
    dtype, rows_per_head = query_BTNH.dtype, repeats // joined * block_q
    query, byte_rows = queries_for(query_BTNH, key_pages_LPZF, num_kv_heads, rows_per_head)
    width = byte_rows.lanes if byte_rows else width
    query = jnp.pad(query, ((0, 0), (0, parts * block_q - tokens), (0, 0), (0, 0)))
    query = query.reshape(batch * parts, block_q, num_heads, head_dim)
    start_B, all_real = jnp.clip(start_B.astype(jnp.int32), 0, num_slots), length_B is None
    length_B = jnp.full_like(start_B, tokens) if length_B is None else jnp.clip(length_B, 0, tokens).astype(jnp.int32)
    first_P = jnp.arange(parts, dtype=jnp.int32) * block_q
    # Blocks without a real token attend to the first slots alone, which costs least.
    start_BP = jnp.where(first_P < length_B[:, None], jnp.minimum(start_B[:, None] + first_P, num_slots), 0)
    arrangement = arrangement_of(query, num_kv_heads, rows, width, interpreted=bool(interpret))
    mixed = attend_pages(
        arrangement.laid_out(query),
        [key_pages_LPZF, value_pages_LPZF],
        jnp.asarray(layer, jnp.int32),
        table_BX.astype(jnp.int32),
        start_BP.reshape(-1),
        encode_places(block_q, **mask_rows(block_q, repeats, rows, arrangement)),
        spread_sinks(sink_logits_N, num_kv_heads // joined, block_q, rows, arrangement.beside),
        order=ChainOrder(block_q, num_slots, window),
        layout=Pages(page_size, block // page_size, num_kv_heads, rows, arrangement, byte_rows),
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        interpret=interpret,
    )
    mixed_BTNH = arrangement.taken_back(mixed).reshape(batch, parts * block_q, num_heads, head_dim)[:, :tokens]
    if not all_real:
        is_token_BT = jnp.arange(tokens) < length_B[:, None]
        mixed_BTNH = jnp.where(is_token_BT[..., None, None], mixed_BTNH, 0)
    return mixed_BTNH.astype(dtype)
