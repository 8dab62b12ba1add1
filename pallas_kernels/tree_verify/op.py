"""Attention of a tree of drafted tokens to a long cache and to each other."""

from typing import Any

import jax
from jax.typing import ArrayLike

from pallas_kernels.flash_decode.op import attend_flat
from pallas_kernels.slot_order import DenseOrder
from pallas_kernels.window import Window

MAX_NODES = 128


def tree_verify(
    query_BMNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    start_B: jax.Array,
    ancestors_BMM: jax.Array | None = None,
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
    """Attend with M = 1 to 128 nodes per row to ``cache[layer]``, which already holds them: ``[B, M, N, H]``.

    The cache ``[L, B, S, K*H]`` holds the heads of a slot side by side. Node i of row b is in slot ``start_B[b] + i``.
    It attends to all slots before ``start``, to itself and to its ancestors: ``ancestors_BMM[b, i, j]`` is true if j is
    i or an ancestor of i. One tree may serve all rows; None is a chain. A ``window`` keeps what it
    spans along a node's path. The other options are those of `flash_decode` (SpecInfer, 2305.09781).
    """
    batch, nodes = query_BMNH.shape[:2]
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"tree_verify takes 1 to {MAX_NODES} nodes, not {nodes}")
    if ancestors_BMM is not None and ancestors_BMM.shape not in ((batch, nodes, nodes), (1, nodes, nodes)):
        raise ValueError(
            f"tree_verify: ancestors {ancestors_BMM.shape} of {batch} rows must be [B or 1, {nodes}, {nodes}]"
        )
    order = DenseOrder(nodes, keys_LBSF.shape[2], window)
    return attend_flat(
        "tree_verify", query_BMNH, keys_LBSF, values_LBSF, layer, start_B, ancestors_BMM, order, scale=scale,
        softcap=softcap, num_kv_heads=num_kv_heads, block_slots=block_slots, lane_parts=lane_parts,
        sink_logits_N=sink_logits_N, interpret=interpret,
    )  # fmt: skip
