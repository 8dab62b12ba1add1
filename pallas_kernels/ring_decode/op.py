"""Attention of a few new tokens per row to a ring of slots and to sinks, the sequence's first tokens."""

from typing import Any

import jax
from jax.typing import ArrayLike

from pallas_kernels.flash_decode.op import attend_flat
from pallas_kernels.head_groups import LANES
from pallas_kernels.slot_order import RingOrder
from pallas_kernels.window import Window, widest

MAX_TOKENS = 128
MAX_SINKS = LANES


def ring_decode(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    ancestors_BTT: jax.Array | None = None,
    sink_query_BTNH: jax.Array | None = None,
    *,
    window: Window,
    num_sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    num_kv_heads: int | None = None,
    block_slots: int | None = None,
    lane_parts: int | None = None,
    sink_logits_N: ArrayLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with T new tokens per row to sinks and a ring in ``cache[layer]``, which holds them: ``[B, T, N, H]``.

    The token at position p of a sequence is in slot p if p < ``num_sinks``, else in ``num_sinks + (p - num_sinks) %
    C``, where C is the rest of the S slots. Token i of row b is in the slot of position ``start_B[b] + i``. It attends
    to the sinks and to the ``window`` up to itself; of the new tokens, only to its ancestors (as in
    `tree_verify`), at the position of its depth. C must hold the window and T - 1 tokens more. Padding among the new
    tokens need not be written. Starts are clipped to 0..2**30.

    Keys are stored rotated for their position in the sequence. If rotary positions are places in the cache
    (StreamingLLM, 2309.17453), sinks are closer than that: ``sink_query_BTNH`` is the query rotated back by the number
    of evicted tokens, used for the sinks instead of ``query_BTNH``. The other options are those of `flash_decode`.
    """
    tokens, num_slots = query_BTNH.shape[1], keys_LBSF.shape[2]
    capacity = num_slots - num_sinks
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"ring_decode takes 1 to {MAX_TOKENS} new tokens, not {tokens}")
    if not 0 <= num_sinks <= MAX_SINKS:
        raise ValueError(f"ring_decode takes 0 to {MAX_SINKS} sinks, not {num_sinks}")
    if capacity < widest(window) + tokens - 1:
        raise ValueError(
            f"ring_decode: {num_slots} slots less {num_sinks} sinks do not hold window={window} and {tokens} new tokens"
        )
    if sink_query_BTNH is not None and (sink_query_BTNH.shape != query_BTNH.shape or not num_sinks):
        raise ValueError(
            f"ring_decode: the sinks' query {sink_query_BTNH.shape} must be like {query_BTNH.shape}, with "
            f"num_sinks={num_sinks} above 0"
        )
    order = RingOrder(tokens, num_slots, window, num_sinks)
    return attend_flat(
        "ring_decode", query_BTNH, keys_LBSF, values_LBSF, layer, start_B, ancestors_BTT, order, sink_query_BTNH,
        scale=scale, softcap=softcap, num_kv_heads=num_kv_heads, block_slots=block_slots, lane_parts=lane_parts,
        sink_logits_N=sink_logits_N, interpret=interpret,
    )  # fmt: skip
