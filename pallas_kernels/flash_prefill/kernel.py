"""Attention of a block of queries to the slots before it, one block of keys at a time.

One grid step holds ``block_q`` queries of one head and ``block_s`` slots of its key/value head. It attends to the slots
that some query can see, ``block_k`` at a time, with a running softmax (FlashAttention-2, 2307.08691). Blocks that are
fully visible to every query are not masked. The block of the queries' own slots comes last and also divides by the
sums: so a row of blocks ends with one stretch of code in which the matrix unit is never idle. If the prompt starts in
slot 0, that block is a fixed triangle, and tiles above the diagonal are skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import LOWEST, SINK_TOTAL, ScoreRule
from pallas_kernels.flash_prefill.lane_windows import LaneWindows
from pallas_kernels.head_groups import LANES
from pallas_kernels.window import Chunk, Window, oldest

# More than the default of 16 MB; the smallest vector memory of the chips in use is 64 MB.
_VMEM_LIMIT_BYTES = 56 << 20
# How many queries' scores are computed at a time, while the products of as many others run: the most of these that
# divide a block into several parts. `python -m pallas_kernels.bench --tpu v5e --kernel flash_prefill` measures other
# values.
_CHUNK_ROWS = (256, 128)


@dataclass(frozen=True)
class Tiling:
    """The block sizes: ``block_s`` is a multiple of ``block_k``, which is a multiple of 128.

    With ``from_zero``, ``block_q`` is a multiple of ``block_k`` and ``block_s`` one of ``block_q``.
    """

    block_q: int
    block_k: int
    block_s: int

    @property
    def chunk_rows(self) -> int:
        """The number of queries computed at a time."""
        return next((rows for rows in _CHUNK_ROWS if self.block_q % rows == 0 and self.block_q > rows), self.block_q)


@dataclass(frozen=True)
class Prefill:
    """The static facts of a call; without ``from_zero`` each row's tokens start in a slot known only at run time."""

    tokens: int
    slots: int
    heads_per_kv: int
    windows: LaneWindows
    tiling: Tiling
    rule: ScoreRule
    window: Window | None
    from_zero: bool

    def last_block(self, length: Any) -> Any:
        """Return the last block of queries that holds a token of a row."""
        return lax.div(jnp.maximum(length, 1) - 1, self.tiling.block_q)

    def slot_range(self, start: Any, length: Any, q_block: Any) -> tuple[Any, Any]:
        """Return the first slot that a block of queries attends to and the one after the last; never an empty range."""
        first_token = jnp.minimum(q_block, self.last_block(length)) * self.tiling.block_q
        end = start + jnp.minimum(first_token + self.tiling.block_q, jnp.maximum(length, 1))
        end = jnp.clip(end, 1, self.slots)
        if self.window is None:
            return jnp.zeros_like(end), end
        return jnp.clip(oldest(self.window, start + first_token), 0, end - 1), end


def attend_prompt(
    query_BTI: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    prefill: Prefill,
    with_logsumexp: bool,
    interpret: Any,
    sinks_N: jax.Array | None = None,
) -> list[jax.Array]:
    """Return ``[B, T, N * W]`` like the queries and, if requested, the log-sum-exp ``[B, N, 1, T]`` in base 2.

    ``sinks_N`` are the heads' scores that have no slot, in base 2.
    """
    tiling, windows = prefill.tiling, prefill.windows
    lanes = windows.width
    batch, tokens, width = query_BTI.shape
    num_heads = width // lanes

    sinks = [] if sinks_N is None else [sinks_N]

    def at_query(b: Any, n: Any, i: Any, s: Any, layer: Any, start: Any, length: Any, *_: Any) -> tuple[Any, ...]:
        return b, jnp.minimum(i, prefill.last_block(length[b])), n

    def at_slots(
        part: int, b: Any, n: Any, i: Any, s: Any, layer: Any, start: Any, length: Any, *_: Any
    ) -> tuple[Any, ...]:
        # A fully masked block is not fetched: the index stays the same.
        first, end = prefill.slot_range(start[b], length[b], i)
        block = jnp.clip(s, lax.div(first, tiling.block_s), lax.div(end - 1, tiling.block_s))
        return layer[0], b, block, windows.block_index(lax.div(n, prefill.heads_per_kv), part)

    block = (None, None, tiling.block_s, windows.block_lanes)
    slots_specs = [pl.BlockSpec(block, partial(at_slots, part)) for part in range(windows.parts)]
    out_shape = [jax.ShapeDtypeStruct(query_BTI.shape, query_BTI.dtype)]
    out_specs = [pl.BlockSpec((None, tiling.block_q, lanes), lambda b, n, i, s, *_: (b, i, n))]
    if with_logsumexp:
        out_shape.append(jax.ShapeDtypeStruct((batch, num_heads, 1, tokens), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, 1, tiling.block_q), lambda b, n, i, s, *_: (b, n, 0, i)))
    spread = pltpu.VMEM((tiling.block_q, LANES), jnp.float32)
    call = pl.pallas_call(
        partial(_kernel, prefill, with_logsumexp, bool(sinks)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(sinks),
            grid=(batch, num_heads, pl.cdiv(tokens, tiling.block_q), pl.cdiv(prefill.slots, tiling.block_s)),
            in_specs=[pl.BlockSpec((None, tiling.block_q, lanes), at_query), *slots_specs, *slots_specs],
            out_specs=out_specs,
            scratch_shapes=[spread, spread, pltpu.VMEM((tiling.block_q, lanes), jnp.float32)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT_BYTES
        ),
        # An estimate: all tokens real and the cache ending after them. True starts and lengths are not known here.
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * num_heads * tokens * (2 * prefill.slots - tokens) * lanes,
            transcendentals=batch * num_heads * tokens * (2 * prefill.slots - tokens) // 2,
            bytes_accessed=2 * (query_BTI.size + keys_LBSF[0].size) * query_BTI.dtype.itemsize,
        ),
        interpret=interpret,
        name="flash_prefill",
    )
    held = [keys_LBSF] * windows.parts + [values_LBSF] * windows.parts
    return list(call(layer.reshape(1), start_B, length_B, *sinks, query_BTI, *held))


def _kernel(
    prefill: Prefill,
    with_logsumexp: bool,
    has_sinks: bool,
    layer_1: Any,
    start_B: Any,
    length_B: Any,
    *rest: Any,
) -> None:
    # Read before any condition: where kernels are interpreted, a grid's place is not known inside one.
    sink = rest[0][pl.program_id(1)] if has_sinks else None
    query_TI, rest = rest[has_sinks], rest[has_sinks + 1 :]
    parts = prefill.windows.parts
    keys_SI, values_SI, mixed_TI, rest = rest[:parts], rest[parts : 2 * parts], rest[2 * parts], rest[2 * parts + 1 :]
    logsumexp_1T = rest[0] if with_logsumexp else None
    row, q_block, s_block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    tiling = prefill.tiling
    start = jnp.int32(0) if prefill.from_zero else start_B[row]
    length = length_B[row]
    first_token = q_block * tiling.block_q
    is_empty = first_token >= length
    first, end = prefill.slot_range(start, length, q_block)
    fold = _Fold(
        prefill, query_TI, keys_SI, values_SI, mixed_TI, logsumexp_1T, *rest[with_logsumexp:],
        first_slot=start + first_token, num_tokens=length - first_token, end=end, base=s_block * tiling.block_s,
        kv_head=lax.div(pl.program_id(1), prefill.heads_per_kv), sink=sink,
    )  # fmt: skip

    @pl.when(is_empty & (s_block == 0))
    def _() -> None:
        mixed_TI[...] = jnp.zeros_like(mixed_TI)
        if logsumexp_1T is not None:
            logsumexp_1T[...] = jnp.zeros_like(logsumexp_1T)

    first_here, last_here = lax.div(first, tiling.block_s), lax.div(end - 1, tiling.block_s)

    @pl.when(jnp.logical_not(is_empty) & (first_here <= s_block) & (s_block <= last_here))
    def _() -> None:
        blocks_here = tiling.block_s // tiling.block_k
        low, high = s_block * blocks_here, (s_block + 1) * blocks_here
        lowest = jnp.maximum(lax.div(first, tiling.block_k), low)
        # The last block, which is masked, is separate; the blocks left of it are fully visible to all queries.
        last = lax.div(first_token if prefill.from_zero else end - 1, tiling.block_k)
        whole_end = jnp.clip(lax.div(fold.first_slot + 1, tiling.block_k), low, jnp.minimum(last, high))
        if prefill.window is None:
            whole_start = lowest
        else:
            cut = oldest(prefill.window, fold.first_slot + tiling.block_q - 1)
            whole_start = lax.div(jnp.maximum(cut, 0) + tiling.block_k - 1, tiling.block_k)
        whole_start = jnp.clip(whole_start, lowest, jnp.maximum(whole_end, lowest))
        fresh = s_block == first_here
        if prefill.window is not None:
            fresh = _each(lowest, whole_start, fresh, partial(fold.block, masked=True))
        fresh = _each(whole_start, whole_end, fresh, partial(fold.block, masked=False))
        if not prefill.from_zero:
            after = jnp.maximum(whole_end, whole_start)
            fresh = _each(after, jnp.minimum(last, high), fresh, partial(fold.block, masked=True))

        @pl.when(s_block == last_here)
        def _() -> None:
            if prefill.from_zero:
                fold.triangle(first_token - fold.base, fresh)
            else:
                fold.block(last, fresh, masked=True, finish=True)


def _each(low: Any, high: Any, fresh: Any, attend: Callable[[Any, Any], None]) -> Any:
    """Attend to blocks low..high - 1; return whether the next block would still be the first one."""

    def body(index: Any, fresh: Any) -> Any:
        attend(index, fresh != 0)
        return jnp.int32(0)

    return lax.fori_loop(low, high, body, fresh.astype(jnp.int32)) != 0


@dataclass(frozen=True)
class _Chunk:
    """Queries ``row`` to ``row + rows`` of a block, the slots that they attend to, and which of these are masked.

    ``first_masked`` is the first lane tile of slots that is not visible to all queries.
    """

    row: int
    rows: int
    keys_SI: Any
    values_SI: Any
    masked: bool
    first_masked: int = 0


@dataclass(frozen=True)
class _Fold:
    """A block of queries, its running results between blocks of slots, and the positions of both.

    ``keys`` and ``values`` are the parts of their windows of lanes. ``largest``, the same in all lanes, and ``total``,
    split over the lanes, are ``[Q, 128]``. ``base`` is the slot of the first key in the block, ``end`` the one after
    the last visible slot; query q is in slot ``first_slot + q``. ``sink`` is the head's score that has no slot, if any.
    """

    prefill: Prefill
    query_TI: Any
    keys_SI: Any
    values_SI: Any
    mixed_TI: Any
    logsumexp_1T: Any
    largest_TL: Any
    total_TL: Any
    sum_TI: Any
    first_slot: Any
    num_tokens: Any
    end: Any
    base: Any
    kv_head: Any
    sink: Any

    def block(self, index: Any, fresh: Any, masked: bool, finish: bool = False) -> None:
        """Attend with all queries to one block of slots."""
        tiling = self.prefill.tiling
        here = pl.multiple_of(index * tiling.block_k - self.base, tiling.block_k)
        keys_SI, values_SI = self._load(here, tiling.block_k, clean=masked)
        rows = tiling.chunk_rows
        chunks = [_Chunk(row, rows, keys_SI, values_SI, masked) for row in range(0, tiling.block_q, rows)]
        self._attend(chunks, self.first_slot - index * tiling.block_k, fresh, finish)

    def triangle(self, here: Any, fresh: Any) -> None:
        """Attend with each query to the block's own slots up to the query's slot, and finish."""
        block_q = self.prefill.tiling.block_q
        keys_SI, values_SI = self._load(pl.multiple_of(here, block_q), block_q, clean=True)
        rows = self.prefill.tiling.chunk_rows
        chunks = []
        for row in range(0, block_q, rows):
            seen = slice(row + rows)
            first_masked = 0 if self._cuts_triangle() else row // LANES
            chunks.append(_Chunk(row, rows, keys_SI[seen], values_SI[seen], True, first_masked))
        self._attend(chunks, jnp.int32(0), fresh, finish=True)

    def _cuts_triangle(self) -> bool:
        window, block_q = self.prefill.window, self.prefill.tiling.block_q
        if isinstance(window, Chunk):  # where one begins inside the triangle
            return window.size % block_q != 0
        return window is not None and window < block_q

    def _load(self, here: Any, size: int, clean: bool) -> tuple[jax.Array, jax.Array]:
        """Return keys and values; ``clean`` sets values past the end to zero, because they may be NaN."""
        windows = self.prefill.windows
        keys_SI, values_SI = (
            windows.align([part[pl.ds(here, size)] for part in parts], self.kv_head)
            for parts in (self.keys_SI, self.values_SI)
        )
        if clean:
            index_SI = lax.broadcasted_iota(jnp.int32, values_SI.shape, 0)
            values_SI = jnp.where(index_SI < self.end - self.base - here, values_SI, jnp.zeros_like(values_SI))
        return keys_SI, values_SI

    def _visible(self, chunk: "_Chunk", ahead: Any, tile: int) -> jax.Array:
        """Return the visible slots of a lane tile, ``[R, 128]``: query q is ``ahead + q`` slots after the first."""
        row_RL, lane_RL = (lax.broadcasted_iota(jnp.int32, (chunk.rows, LANES), axis) for axis in (0, 1))
        behind_RL = row_RL - lane_RL
        # Padding queries attend to the tokens' last slots, so that the slots after these are never read.
        offset = tile * LANES - chunk.row - ahead
        seen_RL, window = behind_RL >= offset, self.prefill.window
        if isinstance(window, Chunk):
            own_R1 = self.first_slot + chunk.row + lax.broadcasted_iota(jnp.int32, (chunk.rows, 1), 0)
            # The slot of a lane, as that of the query of the same number is ``ahead`` after the first one's.
            first = self.first_slot - ahead + tile * LANES
            seen_RL &= lane_RL >= oldest(window, own_R1) - first
        elif window is not None:
            seen_RL &= behind_RL < offset + window
        return seen_RL

    def _load_rows(self, chunk: "_Chunk", fresh: Any) -> tuple[jax.Array, ...]:
        """Return queries and their running results, which are empty for a ``fresh`` block of queries."""
        here = pl.ds(chunk.row, chunk.rows)
        largest, total = (LOWEST, 0.0) if self.sink is None else (self.sink, SINK_TOTAL)
        return (
            self.query_TI[here],
            jnp.where(fresh, largest, self.largest_TL[here]),
            jnp.where(fresh, total, self.total_TL[here]),
            jnp.where(fresh, 0.0, self.sum_TI[here]),
        )

    def _attend(self, chunks: "list[_Chunk]", ahead: Any, fresh: Any, finish: bool) -> None:
        """Attend with chunks of queries; query q is ``ahead + q`` slots after the first slot.

        The matrix unit runs products in the order in which they are written here: the next chunk's products keep it
        busy during this chunk's softmax. Everything is read before anything is written, because the compiler cannot
        tell that a block of the output and one of the input do not overlap.
        """
        held = [self._load_rows(chunk, fresh) for chunk in chunks]
        upcoming_RS = _dot(held[0][0], chunks[0].keys_SI, 1)
        after = []
        for number, (chunk, kept) in enumerate(zip(chunks, held)):
            products_RS = upcoming_RS
            if number + 1 < len(chunks):
                upcoming_RS = _dot(held[number + 1][0], chunks[number + 1].keys_SI, 1)
            after.append(self._mix(chunk, products_RS, ahead, *kept[1:]))
        for chunk, state in zip(chunks, after):
            if finish:
                self._finish(chunk, *state)
            else:
                here = pl.ds(chunk.row, chunk.rows)
                self.largest_TL[here], self.total_TL[here], self.sum_TI[here] = state

    def _mix(
        self,
        chunk: "_Chunk",
        products_RS: jax.Array,
        ahead: Any,
        before_RL: jax.Array,
        total_RL: jax.Array,
        sum_RI: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a chunk's running results after a block of slots."""
        scores_RS = self.prefill.rule.in_base_2(products_RS)
        if chunk.masked:
            tiles = _lane_tiles(scores_RS)
            for number in range(chunk.first_masked, len(tiles)):
                tiles[number] = jnp.where(self._visible(chunk, ahead, number), tiles[number], LOWEST)
            scores_RS = jnp.concatenate(tiles, axis=1)
        largest_RL = jnp.maximum(before_RL, jnp.max(scores_RS, axis=1, keepdims=True))
        kept_RL = jnp.exp2(before_RL - largest_RL)
        weights_RS = jnp.exp2(scores_RS - _over_lanes(largest_RL, scores_RS.shape[1]))
        total_RL = total_RL * kept_RL + reduce(jnp.add, _lane_tiles(weights_RS))
        added_RI = _dot(weights_RS.astype(chunk.values_SI.dtype), chunk.values_SI, 0)
        return largest_RL, total_RL, sum_RI * _over_lanes(kept_RL, sum_RI.shape[1]) + added_RI

    def _finish(self, chunk: "_Chunk", largest_RL: jax.Array, total_RL: jax.Array, sum_RI: jax.Array) -> None:
        """Write the weighted means, and zeros for padding."""
        here = pl.ds(chunk.row, chunk.rows)
        total_R1 = jnp.sum(total_RL, axis=1, keepdims=True)
        is_token_R1 = lax.broadcasted_iota(jnp.int32, (chunk.rows, 1), 0) < self.num_tokens - chunk.row
        mixed_RI = jnp.where(is_token_R1, sum_RI * (1.0 / total_R1), 0.0)
        self.mixed_TI[here] = mixed_RI.astype(self.mixed_TI.dtype)
        if self.logsumexp_1T is not None:
            logsumexp_RL = jnp.where(is_token_R1, largest_RL + jnp.log2(total_R1), 0.0)
            self.logsumexp_1T[:, here] = logsumexp_RL.T[:1]


def _dot(left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left, right, (((1,), (contracted,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _over_lanes(spread_RL: jax.Array, lanes: int) -> jax.Array:
    """Repeat a value that is the same in all lanes over another number of lanes."""
    return jnp.tile(spread_RL, (1, -(-lanes // LANES)))[:, :lanes]


def _lane_tiles(array_RS: jax.Array) -> list[jax.Array]:
    return [array_RS[:, at : at + LANES] for at in range(0, array_RS.shape[1], LANES)]
