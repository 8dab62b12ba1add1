"""The kernel of flash_decode, tree_verify and ring_decode: few queries per row, one layer of a flat cache.

The grid has a step for each block of slots that some query of a row attends to, row after row. So blocks past a row's
length or outside its window are neither fetched nor computed, and fetching never pauses between rows. Only blocks that
are not fully visible to every query are masked.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import Running, ScoreRule, attend_block, multiply_by_keys, running_scratch
from pallas_kernels.byte_rows import ByteRows
from pallas_kernels.head_groups import LANES
from pallas_kernels.slot_order import SlotOrder
from pallas_kernels.step_list import list_steps

VMEM_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Tiling:
    """The slots per step, the rows of queries computed together, and the parts of the lanes that cores share."""

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
    sink_query_BCRI: jax.Array | None = None,
    sinks_CRL: jax.Array | None = None,
    *,
    order: SlotOrder,
    rule: ScoreRule,
    tiling: Tiling,
    byte_rows: ByteRows | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return ``[B, C, R, I]``: attention of the queries of `spread_queries` to ``cache[layer]``.

    ``order`` says which slots hold which tokens, and ``encoded_BRA`` (`encode_ancestors`) which new tokens a query
    attends to. Keys that are values too are given as both, and read once. The first tokens that stay, if any, use their
    own query. ``sinks_CRL`` are those of `spread_sinks`.
    """
    batch, groups, rows, lanes = query_BCRI.shape
    num_slots, width = keys_LBSF.shape[2:]
    block, parts = tiling.block_slots, tiling.lane_parts
    num_blocks = pl.cdiv(order.num_slots, block)
    start_B = start_B.astype(jnp.int32)
    first_B, last_B = order.block_range(start_B, block)
    steps = list_steps(jnp.minimum(first_B, last_B), last_B, num_blocks)
    layer_1 = jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))
    scalars = (steps.row_I, steps.block_I, start_B, order.first_new_slots(start_B), layer_1)
    sinks = [] if sinks_CRL is None else [sinks_CRL]
    queries = [query_BCRI] if sink_query_BCRI is None else [query_BCRI, sink_query_BCRI]

    def row_block(part: Any, step: Any, row_I: Any, *_: Any) -> tuple[Any, ...]:
        return row_I[step], part, 0, 0

    def cache_block(part: Any, step: Any, row_I: Any, block_I: Any, _: Any, __: Any, layer_1: Any) -> tuple[Any, ...]:
        return layer_1[0], row_I[step], block_I[step], part

    def encoded_block(_: Any, step: Any, row_I: Any, *__: Any) -> tuple[Any, ...]:
        return row_I[step] if encoded_BRA.shape[0] > 1 else 0, 0, 0

    def sinks_block(part: Any, *_: Any) -> tuple[Any, ...]:
        return part, 0, 0

    held = [keys_LBSF] if values_LBSF is keys_LBSF else [keys_LBSF, values_LBSF]
    if not interpret:
        # Else the compiler may copy a whole stack of small caches, such as rings, into vector memory for every layer.
        held = [pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in held]
    query_spec = pl.BlockSpec((None, groups // parts, rows, lanes), row_block)
    cache_spec = pl.BlockSpec((None, None, block, width // parts), cache_block)
    body = functools.partial(
        _attend_step, num_queries=len(queries), has_values=len(held) > 1, has_sinks=bool(sinks), order=order, rule=rule,
        tiling=tiling, byte_rows=byte_rows,
    )  # fmt: skip
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(parts, steps.count),
            in_specs=[
                *[query_spec] * len(queries),
                *[cache_spec] * len(held),
                pl.BlockSpec((None, *encoded_BRA.shape[1:]), encoded_block),
                *[pl.BlockSpec((groups // parts, rows, LANES), sinks_block)] * len(sinks),
            ],
            out_specs=query_spec,
            scratch_shapes=running_scratch(groups // parts, rows, lanes),
        ),
        out_shape=jax.ShapeDtypeStruct(query_BCRI.shape, query_BCRI.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        # An upper bound: full rows without a window. The true lengths are not known here.
        cost_estimate=pl.CostEstimate(
            flops=4 * query_BCRI.size * num_slots,
            transcendentals=batch * groups * rows * num_slots,
            bytes_accessed=len(held) * batch * num_slots * width * keys_LBSF.dtype.itemsize
            + (len(queries) + 1) * query_BCRI.size * query_BCRI.dtype.itemsize,
        ),
        interpret=interpret,
        name="attend_cache",
    )(*scalars, *queries, *held, encoded_BRA, *sinks)


def _attend_step(
    row_I: Any,
    block_I: Any,
    start_B: Any,
    first_new_B: Any,
    _: Any,
    *refs: Any,
    num_queries: int,
    has_values: bool,
    has_sinks: bool,
    order: SlotOrder,
    rule: ScoreRule,
    tiling: Tiling,
    byte_rows: ByteRows | None,
) -> None:
    queries, (keys_SF, *rest) = refs[:num_queries], refs[num_queries:]
    values_SF, encoded_RA, *rest = rest if has_values else (keys_SF, *rest)
    sinks_CRL, (output_CRI, *scratch) = (rest[0], rest[1:]) if has_sinks else (None, rest)
    query_CRI = queries[0]
    step = pl.program_id(1)
    row, block = row_I[step], block_I[step]
    lanes, slots = query_CRI.shape[-1], tiling.block_slots
    running = Running(*scratch)
    start, first_new = start_B[row], first_new_B[row]
    first_slot = block * slots
    is_first = (step == 0) | (row_I[jnp.maximum(step - 1, 0)] != row)
    is_last = first_slot + slots >= order.end(start)
    is_partial = jnp.logical_not(order.sees_all(start, first_new, first_slot, slots))

    def lanes_of(group: int) -> slice:
        return slice(group * lanes, (group + 1) * lanes)

    def held(block_SF: Any, group: int, first: int) -> jax.Array:
        return block_SF[:first, lanes_of(group)].astype(query_CRI.dtype)

    if byte_rows is not None:
        is_written_1S = first_slot + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1) < order.end(start)
        scales = [byte_rows.scales(block_SF[:, byte_rows.tail :], is_written_1S) for block_SF in (keys_SF, values_SF)]

    def scaled(which: int, group: int, rows: Any, numbers_RS: jax.Array) -> jax.Array:
        if byte_rows is None:
            return numbers_RS
        return numbers_RS * byte_rows.of_rows(scales[which], group, query_CRI.shape[0], rows.start, numbers_RS)

    def products_by_number(group: int, rows: Any) -> jax.Array:
        return multiply_by_keys(query_CRI[group, rows], held(keys_SF, group, slots))

    def products(group: int, rows: Any) -> jax.Array:
        return scaled(0, group, rows, products_by_number(group, rows))

    def products_with_sinks(group: int, rows: Any) -> jax.Array:
        return scaled(0, group, rows, with_sinks(group, rows, products_by_number(group, rows)))

    def with_sinks(group: int, rows: Any, products_RS: jax.Array) -> jax.Array:
        if num_queries == 1:
            return products_RS
        near_RL = multiply_by_keys(queries[1][group, rows], held(keys_SF, group, LANES))
        slot_1L = first_slot + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        first_RL = jnp.where(slot_1L < order.num_sinks, near_RL, products_RS[:, :LANES])
        return jnp.concatenate([first_RL, products_RS[:, LANES:]], axis=1) if slots > LANES else first_RL

    def visible(rows: Any) -> jax.Array:
        slot_1S = first_slot + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1)
        return order.visible(start, first_new, slot_1S, encoded_RA[rows])

    def values(group: int) -> jax.Array:
        return held(values_SF, group, slots)

    def written_values(group: int) -> jax.Array:
        # Slots past the end of a row or the cache may hold NaN, and zero times NaN is NaN.
        values_SI = values(group)
        slot_SI = first_slot + jax.lax.broadcasted_iota(jnp.int32, values_SI.shape, 0)
        return jnp.where(slot_SI < order.end(start), values_SI, jnp.zeros_like(values_SI))

    weights = None if byte_rows is None else functools.partial(scaled, 1)

    @pl.when(is_first)
    def _() -> None:
        running.start(sinks_CRL)

    @pl.when(is_partial)
    def _() -> None:
        attend_block(products_with_sinks, written_values, visible, running, rule, tiling.block_rows, weights)

    @pl.when(jnp.logical_not(is_partial))
    def _() -> None:
        attend_block(products, values, None, running, rule, tiling.block_rows, weights)

    @pl.when(is_last)
    def _() -> None:
        running.finish(output_CRI)
