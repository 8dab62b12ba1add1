"""The kernel of flash_decode and tree_verify: few queries a row against one layer of a flat cache.

The grid has a step for each block of slots that some query of a row sees, rows one after another, so that blocks past
a row's length or out of its window are neither fetched nor computed, and fetching never pauses between rows. Only
blocks that some query does not see as a whole are masked.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ancestors import depth_of_rows, sees_new_token
from pallas_kernels.block_attention import Running, ScoreRule, attend_block, multiply_by_keys, running_scratch
from pallas_kernels.step_list import list_steps

VMEM_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Tiling:
    """Slots a step, rows of queries that are computed together, and parts of the lanes that cores share."""

    block_slots: int
    block_rows: int = 128
    lane_parts: int = 1


def attend_cache(
    query_BCRI: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    encoded_BRA: jax.Array,
    *,
    num_tokens: int,
    num_slots: int,
    window: int | None,
    rule: ScoreRule,
    tiling: Tiling,
    interpret: Any = False,
) -> jax.Array:
    """Return ``[B, C, R, I]``: the queries of `spread_queries` over ``cache[layer]``.

    New token i of row b stands in slot ``start_B[b] + i``; ``encoded_BRA`` (`encode_ancestors`) tells which of them a
    query sees besides all slots before ``start``, or the last ``window`` of its path. Slots from ``num_slots`` on are
    padding.
    """
    _, groups, rows, lanes = query_BCRI.shape
    width = keys_LBSF.shape[3]
    block, parts = tiling.block_slots, tiling.lane_parts
    num_blocks = pl.cdiv(num_slots, block)
    start_B = jnp.clip(start_B.astype(jnp.int32), 0, num_slots)
    end_B = jnp.minimum(start_B + num_tokens, num_slots)
    first_B = jnp.zeros_like(start_B) if window is None else jnp.maximum(start_B - window + 1, 0) // block
    last_B = (end_B - 1) // block
    steps = list_steps(jnp.minimum(first_B, last_B), last_B, num_blocks)
    layer_1 = jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))
    scalars = (steps.row_I, steps.block_I, start_B, layer_1)

    def row_block(part: Any, step: Any, row_I: Any, *_: Any) -> tuple[Any, ...]:
        return row_I[step], part, 0, 0

    def cache_block(part: Any, step: Any, row_I: Any, block_I: Any, _: Any, layer_1: Any) -> tuple[Any, ...]:
        return layer_1[0], row_I[step], block_I[step], part

    def encoded_block(_: Any, step: Any, row_I: Any, *__: Any) -> tuple[Any, ...]:
        return row_I[step] if encoded_BRA.shape[0] > 1 else 0, 0, 0

    query_spec = pl.BlockSpec((None, groups // parts, rows, lanes), row_block)
    cache_spec = pl.BlockSpec((None, None, block, width // parts), cache_block)
    body = functools.partial(
        _attend_step, num_tokens=num_tokens, num_slots=num_slots, window=window, rule=rule, tiling=tiling
    )
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(parts, steps.count),
            in_specs=[
                query_spec,
                cache_spec,
                cache_spec,
                pl.BlockSpec((None, *encoded_BRA.shape[1:]), encoded_block),
            ],
            out_specs=query_spec,
            scratch_shapes=running_scratch(groups // parts, rows, lanes),
        ),
        out_shape=jax.ShapeDtypeStruct(query_BCRI.shape, query_BCRI.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="attend_cache",
    )(*scalars, query_BCRI, keys_LBSF, values_LBSF, encoded_BRA)


def _attend_step(
    row_I: Any,
    block_I: Any,
    start_B: Any,
    _: Any,
    query_CRI: Any,
    keys_SF: Any,
    values_SF: Any,
    encoded_RA: Any,
    output_CRI: Any,
    *scratch: Any,
    num_tokens: int,
    num_slots: int,
    window: int | None,
    rule: ScoreRule,
    tiling: Tiling,
) -> None:
    step = pl.program_id(1)
    row, block = row_I[step], block_I[step]
    lanes, slots = query_CRI.shape[-1], tiling.block_slots
    running = Running(*scratch)
    start = start_B[row]
    end = jnp.minimum(start + num_tokens, num_slots)
    # Slots are counted from the first new token's.
    base = block * slots - start
    offset_1S = base + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1)
    is_first = (step == 0) | (row_I[jnp.maximum(step - 1, 0)] != row)
    is_last = (block + 1) * slots >= end
    is_partial = base + slots > 0
    if window is not None:
        is_partial |= base <= num_tokens - 1 - window

    def lanes_of(group: int) -> slice:
        return slice(group * lanes, (group + 1) * lanes)

    def products(group: int, rows: Any) -> jax.Array:
        return multiply_by_keys(query_CRI[group, rows], keys_SF[:, lanes_of(group)])

    def visible(rows: Any) -> jax.Array:
        encoded = encoded_RA[rows]
        old_RS = offset_1S < 0
        if window is not None:
            old_RS &= offset_1S > depth_of_rows(encoded) - window
        return old_RS | sees_new_token(encoded, offset_1S)

    def values(group: int) -> jax.Array:
        return values_SF[:, lanes_of(group)]

    def written_values(group: int) -> jax.Array:
        # What lies past a row's end, or the cache's, may be anything, and nothing times NaN is NaN.
        held = values(group)
        offset_SI = base + jax.lax.broadcasted_iota(jnp.int32, held.shape, 0)
        return jnp.where(offset_SI < end - start, held, jnp.zeros_like(held))

    @pl.when(is_first)
    def _() -> None:
        running.start()

    @pl.when(is_partial)
    def _() -> None:
        attend_block(products, written_values, visible, running, rule, tiling.block_rows)

    @pl.when(jnp.logical_not(is_partial))
    def _() -> None:
        attend_block(products, values, None, running, rule, tiling.block_rows)

    @pl.when(is_last)
    def _() -> None:
        running.finish(output_CRI)
