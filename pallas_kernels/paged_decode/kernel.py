"""The kernel of paged_decode and paged_prefill: a block of queries per row, one layer of pages given by a table.

The grid has a step for each block of pages that some query of a row attends to, row after row. While a step computes,
the next step's pages are copied to one of two buffers. Pages without tokens of the row, or outside its window, are
neither looked up nor copied.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import Running, ScoreRule, attend_block, multiply_by_keys, running_scratch
from pallas_kernels.byte_rows import ByteRows
from pallas_kernels.head_groups import LANES
from pallas_kernels.paged_decode.arrangement import Arrangement
from pallas_kernels.slot_order import DenseOrder
from pallas_kernels.step_list import list_steps
from pallas_kernels.window import oldest

VMEM_LIMIT_BYTES = 64 << 20
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Pages:
    """The layout of pages: ``per_block`` of ``size`` slots per step, possibly of rows in bytes.

    There are ``rows`` queries per group of key/value heads, with padding.
    """

    size: int
    per_block: int
    num_kv_heads: int
    rows: int
    arrangement: Arrangement
    byte_rows: ByteRows | None = None

    @property
    def block_slots(self) -> int:
        """The slots of a step."""
        return self.size * self.per_block


def attend_pages(
    queries: jax.Array,
    pages: list[jax.Array],
    layer: jax.Array,
    table_BX: jax.Array,
    start_B: jax.Array,
    encoded_BRA: jax.Array,
    sinks_CRL: jax.Array | None = None,
    *,
    order: DenseOrder,
    layout: Pages,
    rule: ScoreRule,
    interpret: Any = False,
) -> jax.Array:
    """Return attention of the queries to the pages of ``layer``, like the queries.

    ``queries`` are laid out by the arrangement. ``pages`` are keys and values ``[L, P, Z,
    F]``. ``table_BX`` holds the page of each Z slots of a row; entries are clipped to 0..P-1. If it has fewer rows than
    there are queries, as many rows of queries as evenly follow one another share one. ``encoded_BRA`` are those of all
    rows of a group, or of one block of rows if the others' are the same.
    ``sinks_CRL`` are those of `spread_sinks`.
    """
    batch, rows, byte_rows = queries.shape[0], layout.rows, layout.byte_rows
    width = pages[0].shape[3] if byte_rows is None else byte_rows.lanes
    is_inside = layout.arrangement.is_inside
    groups = layout.num_kv_heads if is_inside else queries.shape[1]
    lanes = width // groups
    slots = layout.block_slots
    num_blocks = pl.cdiv(order.num_slots, slots)
    first_B, last_B = order.block_range(start_B, slots)
    steps = list_steps(jnp.minimum(first_B, last_B), last_B, num_blocks)
    table_X = jnp.clip(table_BX, 0, pages[0].shape[1] - 1).reshape(-1)
    scalars = (steps.row_I, steps.block_I, jnp.reshape(steps.count, (1,)), start_B, jnp.reshape(layer, (1,)), table_X)
    buffers = [pltpu.VMEM((2, layout.per_block, *pool.shape[2:]), pool.dtype) for pool in pages]
    if byte_rows is not None:
        plain = pltpu.VMEM((slots, width), queries.dtype)
        spread = pltpu.VMEM((byte_rows.scale_rows, slots), jnp.float32)
        buffers += [plain, plain, spread, spread]

    if is_inside:
        buffers.append(pltpu.VMEM((groups, rows, lanes), queries.dtype))

    def row_block(step: Any, row_I: Any, *_: Any) -> tuple[Any, ...]:
        return row_I[step], *[0] * (queries.ndim - 1)

    def encoded_block(step: Any, row_I: Any, *_: Any) -> tuple[Any, ...]:
        return row_I[step] if encoded_BRA.shape[0] > 1 else 0, 0, 0

    query_spec = pl.BlockSpec((1, *queries.shape[1:]), row_block)
    sinks = [] if sinks_CRL is None else [sinks_CRL]
    return pl.pallas_call(
        functools.partial(
            _attend_step,
            num_pools=len(pages),
            has_sinks=bool(sinks),
            rows_per_table=batch // table_BX.shape[0],
            order=order,
            layout=layout,
            rule=rule,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps.count,),
            in_specs=[
                query_spec,
                pl.BlockSpec((None, *encoded_BRA.shape[1:]), encoded_block),
                *[pl.BlockSpec((groups, rows, LANES), lambda *_: (0, 0, 0))] * len(sinks),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(pages),
            ],
            out_specs=query_spec,
            scratch_shapes=[
                *running_scratch(groups, rows, lanes),
                pltpu.SemaphoreType.DMA((2, len(pages))),
                *buffers,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        cost_estimate=_most_work(queries, pages, table_BX.shape[1]),
        interpret=interpret,
        name="attend_pages",
    )(*scalars, queries, encoded_BRA, *sinks, *pages)


def _most_work(queries: jax.Array, pages: list[jax.Array], num_pages: int) -> pl.CostEstimate:
    """Return an upper bound: full rows without a window. The true lengths are not known here."""
    num_slots = num_pages * pages[0].shape[2]
    page_bytes = sum(math.prod(pool.shape[2:]) * pool.dtype.itemsize for pool in pages)
    # Of queries that are spread, most lanes may be zeros.
    return pl.CostEstimate(
        flops=4 * queries.size * num_slots,
        transcendentals=queries.size // LANES * num_slots,
        bytes_accessed=queries.shape[0] * num_pages * page_bytes + 2 * queries.size * queries.dtype.itemsize,
    )


def _attend_step(
    row_I: Any,
    block_I: Any,
    count_1: Any,
    start_B: Any,
    layer_1: Any,
    table_X: Any,
    queries: Any,
    encoded_RA: Any,
    *refs: Any,
    num_pools: int,
    has_sinks: bool,
    rows_per_table: int,
    order: DenseOrder,
    layout: Pages,
    rule: ScoreRule,
) -> None:
    sinks_CRL, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
    pools, (output, *scratch) = refs[:num_pools], refs[num_pools:]
    running, arrived, scratch = Running(*scratch[:3]), scratch[3], scratch[4:]
    buffers, unpacked = scratch[:num_pools], scratch[num_pools:]
    query_CRI = unpacked[-1] if layout.arrangement.is_inside else queries.at[0]
    step, slots = pl.program_id(0), layout.block_slots
    row, half = row_I[step], lax.rem(step, 2)
    start = start_B[row]
    first_slot = block_I[step] * slots
    pages_per_row = table_X.shape[0] * rows_per_table // start_B.shape[0]

    def seen_slots(start: Any) -> tuple[Any, Any]:
        first = 0 if order.window is None else jnp.maximum(oldest(order.window, start), 0)
        return first, order.end(start)

    def needed_pages(step: Any) -> tuple[Any, Any]:
        """Return the first page of a step to copy, and the one after the last."""
        first_seen, end = seen_slots(start_B[row_I[step]])
        before = block_I[step] * layout.per_block
        last = lax.div(end + layout.size - 1, layout.size)
        return jnp.maximum(lax.div(first_seen, layout.size) - before, 0), jnp.minimum(last - before, layout.per_block)

    def fetch(step: Any) -> None:
        table_row = lax.div(row_I[step], rows_per_table)
        half, entry = lax.rem(step, 2), table_row * pages_per_row + block_I[step] * layout.per_block

        @pl.loop(*needed_pages(step))
        def _(place: jax.Array) -> None:
            named = table_X[entry + place]
            for index, (pool, buffer) in enumerate(zip(pools, buffers)):
                source, target = pool.at[layer_1[0], named], buffer.at[half, place]
                pltpu.make_async_copy(source, target, arrived.at[half, index]).start()

    def wait(step: Any) -> None:
        first, last = needed_pages(step)
        is_whole = last - first == layout.per_block

        @pl.when(is_whole)
        def _() -> None:
            # A wait counts bytes: one wait covers the copies of all pages.
            for index, buffer in enumerate(buffers):
                whole = buffer.at[half]
                pltpu.make_async_copy(whole, whole, arrived.at[half, index]).wait()

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            @pl.loop(first, last)
            def _(place: jax.Array) -> None:
                for index, buffer in enumerate(buffers):
                    page = buffer.at[half, place]
                    pltpu.make_async_copy(page, page, arrived.at[half, index]).wait()

    @pl.when(step == 0)
    def _() -> None:
        fetch(step)

    @pl.when(step + 1 < count_1[0])
    def _() -> None:
        fetch(step + 1)

    wait(step)
    if layout.byte_rows is not None:
        _unpack(buffers, unpacked, half, layout, first_slot, *seen_slots(start))
    block = _Block(query_CRI, buffers, unpacked, half, layout, first_slot, *seen_slots(start))

    def visible(rows: Any) -> jax.Array:
        slot_1S = first_slot + lax.broadcasted_iota(jnp.int32, (1, slots), 1)
        return order.visible(start, start, slot_1S, encoded_RA[rows])

    attend = functools.partial(
        attend_block,
        products=block.products,
        rule=rule,
        block_rows=BLOCK_ROWS,
        weights=None if layout.byte_rows is None else block.scaled_weights,
    )
    begin = functools.partial(layout.arrangement.take, queries, query_CRI)
    end = functools.partial(layout.arrangement.put, output)
    is_first = (step == 0) | (row_I[jnp.maximum(step - 1, 0)] != row)
    sees_all = order.sees_all(start, start, first_slot, slots)

    # The block of the new tokens, a row's last one, and those at the end of a window.
    @pl.when(jnp.logical_not(sees_all))
    def _() -> None:
        @pl.when(is_first)
        def _() -> None:
            running.start(sinks_CRL)
            for group in range(query_CRI.shape[0]):
                begin(group)

        if encoded_RA.shape[0] < layout.rows:
            seen_RS = visible(pl.ds(0, BLOCK_ROWS))
            attend(values=block.written_values, visible=lambda _: seen_RS, running=running, end=end)
        else:
            attend(values=block.written_values, visible=visible, running=running, end=end)

    @pl.when(sees_all & is_first)
    def _() -> None:
        attend(values=block.values, visible=None, running=running.at_start(sinks_CRL), begin=begin)

    @pl.when(sees_all & jnp.logical_not(is_first))
    def _() -> None:
        attend(values=block.values, visible=None, running=running)

    # A full row has no new tokens.
    @pl.when(sees_all & (first_slot + slots >= order.end(start)))
    def _() -> None:
        for group in range(query_CRI.shape[0]):
            for first in range(0, layout.rows, BLOCK_ROWS):
                rows = pl.ds(first, min(BLOCK_ROWS, layout.rows))
                end(group, rows, running.mean(group, rows))


@dataclass(frozen=True)
class _Block:
    """The pages of a step, in the form that `attend_block` needs; ``oldest`` to ``end`` are the copied slots."""

    query_CRI: Any
    buffers: Any
    unpacked: Any
    half: Any
    layout: Pages
    first_slot: Any
    oldest: Any
    end: Any

    def products(self, group: int, rows: Any) -> jax.Array:
        products_RS = multiply_by_keys(self.query_CRI[group, rows], self._held(0, group))
        return products_RS if self.layout.byte_rows is None else self._scaled(2, group, rows, products_RS)

    def values(self, group: int) -> jax.Array:
        return self._held(1, group)

    def written_values(self, group: int) -> jax.Array:
        held = self.values(group)
        slot_SI = self.first_slot + lax.broadcasted_iota(jnp.int32, held.shape, 0)
        return jnp.where((slot_SI >= self.oldest) & (slot_SI < self.end), held, jnp.zeros_like(held))

    def scaled_weights(self, group: int, rows: Any, weights_RS: jax.Array) -> jax.Array:
        return self._scaled(3, group, rows, weights_RS)

    def _held(self, index: int, group: int) -> jax.Array:
        lanes = self.query_CRI.shape[-1]
        own = pl.ds(group * lanes, lanes)
        if self.layout.byte_rows is not None:
            return self.unpacked[index][:, own]
        return self.buffers[index][self.half, :, :, own].reshape(self.layout.block_slots, lanes)

    def _scaled(self, index: int, group: int, rows: Any, numbers_RS: jax.Array) -> jax.Array:
        byte_rows, groups = self.layout.byte_rows, self.query_CRI.shape[0]
        assert byte_rows is not None
        return numbers_RS * byte_rows.of_rows(self.unpacked[index], group, groups, rows.start, numbers_RS)


def _unpack(buffers: Any, unpacked: Any, half: Any, layout: Pages, first_slot: Any, oldest: Any, end: Any) -> None:
    """Convert a step's numbers to the queries' dtype, and turn their scales."""
    size, dtype, byte_rows = layout.size, unpacked[0].dtype, layout.byte_rows
    assert byte_rows is not None
    slot_1S = first_slot + lax.broadcasted_iota(jnp.int32, (1, layout.block_slots), 1)
    # The other slots were not copied.
    is_written_1S = (slot_1S >= oldest) & (slot_1S < end)
    for index in range(2):
        tails = []
        for place in range(layout.per_block):
            whole = buffers[index][half, place, :, : byte_rows.lanes].astype(dtype)
            unpacked[index][place * size : (place + 1) * size] = whole
            tails.append(buffers[index][half, place, :, byte_rows.tail :].astype(jnp.bfloat16))
        unpacked[2 + index][...] = byte_rows.scales(jnp.concatenate(tails, axis=0), is_written_1S)
