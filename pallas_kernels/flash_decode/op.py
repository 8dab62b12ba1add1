"""Attention of a few new tokens per row to a long cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.ancestors import encode_ancestors
from pallas_kernels.block_attention import ScoreRule, check_sinks, spread_sinks
from pallas_kernels.byte_rows import ByteRows, check_rows
from pallas_kernels.flash_decode.kernel import Tiling, attend_cache
from pallas_kernels.head_groups import LANES, gather_heads, joined_heads, padded_rows, spread_queries
from pallas_kernels.slot_order import DenseOrder, SlotOrder
from pallas_kernels.tuning import tuned_blocks
from pallas_kernels.window import Window, widest

MAX_TOKENS = 8
Described = jax.Array | jax.ShapeDtypeStruct


def flash_decode(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    block_slots: int | None = None,
    lane_parts: int | None = None,
    sink_logits_N: ArrayLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with T = 1 to 8 new tokens per row to ``cache[layer]``, which already holds them: ``[B, T, N, H]``.

    The cache ``[L, B, S, K*H]`` holds the heads of a slot side by side. New token i of row b is in slot ``start_B[b] +
    i`` and attends to all slots up to its own, or to those in its ``window``. Starts are cut to 0..S. Tokens past the
    cache's end get means of the existing slots. ``scale`` is ``H ** -0.5`` by default. Slots that are not visible are
    read only as the rest of a block of ``block_slots``, a multiple of 128. ``lane_parts`` splits the heads among cores.
    If K*H is no multiple of 128, XLA uses another layout for the cache and copies it for the kernel. To avoid that, pad
    it with zeros to the next multiple and give ``num_kv_heads``. A cache of int8 has rows in bytes (`byte_rows`).
    ``sink_logits_N`` is a score of each head that no slot has: it takes a part of the weights and has no value.
    """
    tokens = query_BTNH.shape[1]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"flash_decode takes 1 to {MAX_TOKENS} new tokens, not {tokens}: use tree_verify or prefill")
    order = DenseOrder(tokens, keys_LBSF.shape[2], window)
    return attend_flat(
        "flash_decode", query_BTNH, keys_LBSF, values_LBSF, layer, start_B, None, order, scale=scale, softcap=softcap,
        num_kv_heads=num_kv_heads, block_slots=block_slots, lane_parts=lane_parts, sink_logits_N=sink_logits_N,
        interpret=interpret,
    )  # fmt: skip


def attend_flat(
    kernel: str,
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    ancestors_BTT: jax.Array | None,
    order: SlotOrder,
    sink_query_BTNH: jax.Array | None = None,
    *,
    scale: float | None,
    softcap: float | None,
    num_kv_heads: int | None,
    block_slots: int | None,
    lane_parts: int | None,
    sink_logits_N: ArrayLike | None,
    interpret: Any,
) -> jax.Array:
    """Check, pad, choose blocks and run the kernel under the name of the calling op."""
    num_kv_heads = num_kv_heads or keys_LBSF.shape[-1] // query_BTNH.shape[-1]
    check_attention(kernel, query_BTNH, keys_LBSF, values_LBSF, start_B, num_kv_heads, softcap, order.window)
    tokens, num_heads, head_dim = query_BTNH.shape[1:]
    check_sinks(kernel, sink_logits_N, num_heads)
    num_slots, width = keys_LBSF.shape[2:]
    in_bytes = keys_LBSF.dtype == jnp.int8
    dtype = query_BTNH.dtype if in_bytes else keys_LBSF.dtype
    if num_slots < LANES:
        # The cache is shorter than a tile: a padded copy is cheaper than special blocks.
        padding = ((0, 0), (0, 0), (0, LANES - num_slots), (0, 0))
        keys_LBSF, values_LBSF = (jnp.pad(buffer[layer][None], padding) for buffer in (keys_LBSF, values_LBSF))
        layer = 0
    shape = decode_shape(query_BTNH, keys_LBSF, num_kv_heads)
    tuned = tuned_blocks(kernel, shape) if block_slots is None or lane_parts is None else {}
    block = min(block_slots or tuned["block_slots"], keys_LBSF.shape[2] // LANES * LANES)
    joined = joined_heads(num_kv_heads, head_dim)
    groups = num_kv_heads // joined
    # Each core would need the scales.
    parts = 1 if in_bytes else lane_parts or tuned.get("lane_parts", 1)
    if block % LANES:
        raise ValueError(f"{kernel}: block_slots={block} is not a multiple of {LANES}")
    if groups % parts:
        raise ValueError(f"{kernel}: {groups} groups of joined heads cannot be split into lane_parts={parts}")
    row_tile = 32 // dtype.itemsize
    repeats = joined * (num_heads // num_kv_heads)
    tiling = Tiling(block, lane_parts=parts)
    rows = padded_rows(repeats * tokens, row_tile, tiling.block_rows)
    start_B = jnp.clip(start_B.astype(jnp.int32), 0, order.max_start)
    byte_rows = ByteRows(num_kv_heads, head_dim, width, repeats // joined * tokens) if in_bytes else None

    def spread(query_BTNH: jax.Array) -> jax.Array:
        return spread_queries(query_BTNH.astype(dtype), num_kv_heads, rows, byte_rows.lanes if byte_rows else width)

    mixed_BCRI = attend_cache(
        spread(query_BTNH),
        keys_LBSF,
        values_LBSF,
        jnp.asarray(layer, jnp.int32),
        start_B,
        encode_ancestors(
            ancestors_BTT,
            tokens,
            order.window,
            repeats,
            rows,
            start_B,
            order.num_sinks,
        ),
        None if sink_query_BTNH is None else spread(sink_query_BTNH),
        spread_sinks(sink_logits_N, groups, tokens, rows),
        order=order,
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        tiling=tiling,
        byte_rows=byte_rows,
        interpret=interpret,
    )
    return gather_heads(mixed_BCRI, tokens, num_heads, num_kv_heads, head_dim).astype(query_BTNH.dtype)


def decode_shape(query_BTNH: Described, keys_LBSF: Described, num_kv_heads: int) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    tokens, num_heads, head_dim = query_BTNH.shape[1:]
    dtype = jnp.dtype(keys_LBSF.dtype).name
    return {"T": tokens, "N": num_heads, "K": num_kv_heads, "H": head_dim, "S": keys_LBSF.shape[2], "dtype": dtype}


def check_attention(
    kernel: str,
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    start_B: jax.Array,
    num_kv_heads: int,
    softcap: float | None,
    window: Window | None,
) -> None:
    """Raise ValueError if shapes or options do not match."""
    if query_BTNH.ndim != 4 or keys_LBSF.ndim != 4:
        raise ValueError(
            f"{kernel}: query {query_BTNH.shape} must be [B, T, N, H] and keys {keys_LBSF.shape} [L, B, S, K*H]"
        )
    batch, _, num_heads, head_dim = query_BTNH.shape
    width = keys_LBSF.shape[3]
    if keys_LBSF.shape != values_LBSF.shape or keys_LBSF.dtype != values_LBSF.dtype:
        raise ValueError(f"{kernel}: keys {keys_LBSF.shape} and values {values_LBSF.shape} must be alike")
    if keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32, jnp.int8):
        raise ValueError(f"{kernel}: a cache of {keys_LBSF.dtype} is not supported: use bfloat16, float32 or int8")
    if keys_LBSF.dtype == jnp.int8:
        check_rows(kernel, width, num_kv_heads, head_dim)
    elif num_kv_heads < 1 or num_heads % num_kv_heads or not 0 <= width - num_kv_heads * head_dim < LANES:
        raise ValueError(
            f"{kernel}: {num_heads} heads of {head_dim} do not share {num_kv_heads} heads in slots of {width} numbers"
        )
    if keys_LBSF.shape[1] != batch or start_B.shape != (batch,):
        raise ValueError(f"{kernel}: {batch} rows of queries, {keys_LBSF.shape[1]} of cache, starts {start_B.shape}")
    if window is not None and widest(window) < 1:
        raise ValueError(f"{kernel}: window={window} must be at least 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{kernel}: softcap={softcap} must be above 0")
