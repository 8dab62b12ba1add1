"""Runs layers that are split over a pipeline's devices: microbatches go from stage to stage.

One program does everything, with GPipe's schedule (1811.06965). In every tick each stage runs its layers on one
microbatch and passes the result on. A stage that has no microbatch yet, or none left, computes the same on other data;
the result is dropped. So all devices always run the same instructions, and devices along other mesh axes may
communicate inside a stage.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.adapters import adapted
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layer_range import apply_block, stack_of
from jaxinfer.models.layer_stack import block_of
from jaxinfer.models.layers import Cycle, index_in_kind
from jaxinfer.models.stages import Schedule, only_cycle, plan_schedule
from jaxinfer.models.step import Carry, Held, Step
from jaxinfer.notation import DATA, PIPELINE, Params
from jaxinfer.ops.backend import Backend

# Past the end of every cache.
_NOWHERE = np.iinfo(np.int32).max // 2


class _Span(NamedTuple):
    """The cycle repeats that each stage runs of its own: from ``lows`` to before ``highs``, at most ``most``.

    Stages ``first .. last`` run at least one.
    """

    lows: np.ndarray
    highs: np.ndarray
    most: int
    first: int
    last: int


def run_stages(
    config: DecoderConfig,
    backend: Backend,
    blocks: Params,
    carry: Carry,
    start: int,
    stop: int,
    step: Step,
    adapters: Params | None = None,
) -> Carry:
    """Run layers ``start .. stop - 1``; ``blocks`` holds all layers' parameters, stacked and split by stages.

    ``adapters`` (`jaxinfer.models.adapters`) are for the layers of this range, whole on every stage.
    """
    if start >= stop:
        return carry
    hidden_BTD, cache = carry
    cycle = only_cycle(config)
    assert cycle is not None
    span = _span(cycle, backend.stages, start, stop)
    rows, tokens, _ = hidden_BTD.shape
    schedule = pass_schedule(backend, blocks, cache, rows, tokens, span.last - span.first + 1)
    body = partial(_run_ticks, config, backend, cycle, range(start, stop), span, schedule)
    split, whole = jax.tree.map(_layers_first, cache), PartitionSpec()
    run = backend.on_stages(body, (PartitionSpec(PIPELINE), whole, split, whole, whole), (whole, split))
    return run(blocks, adapters, cache, hidden_BTD, step)


def pass_schedule(
    backend: Backend, blocks: Params, cache: LayeredCache, rows: int, tokens: int, stages: int | None = None
) -> Schedule:
    """Return the schedule of a pass of ``tokens`` new tokens per row through ``stages`` stages (None: all)."""
    stages = stages or backend.stages
    shards = _row_shards(backend, rows)
    weights, held = (_num_bytes(jax.tree.leaves(tree)) for tree in (blocks, cache))
    return plan_schedule(stages, rows // shards, tokens, weights, held // shards, backend.microbatches)


def _run_ticks(
    config: DecoderConfig,
    backend: Backend,
    cycle: Cycle,
    layers: range,
    span: _Span,
    schedule: Schedule,
    blocks: Params,
    adapters: Params | None,
    cache: LayeredCache,
    hidden_BTD: jax.Array,
    step: Step,
) -> Carry:
    """Run one stage's part of a pass; ``blocks`` and ``cache`` are its own."""
    stage, count = jax.lax.axis_index(PIPELINE), schedule.microbatches
    rows = hidden_BTD.shape[0]
    shards = _row_shards(backend, rows)

    def cut_rows(leaf: jax.Array) -> jax.Array:
        return _cut(leaf, 0, count, shards) if leaf.ndim and leaf.shape[0] == rows else leaf

    def part_of(leaf: jax.Array, given: jax.Array, part: jax.Array) -> jax.Array:
        # Values that are the same for all rows were not cut.
        return leaf[part] if given.ndim and given.shape[0] == rows else leaf

    inputs, steps = cut_rows(hidden_BTD), jax.tree.map(cut_rows, step)
    # Cutting the rows turns a cache into one with ``count`` times as many layers, without moving data.
    parts = jax.tree.map(lambda leaf: _merge(_cut(leaf, 1, count, shards)) if _has_layers(leaf) else leaf, cache)

    def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
        arrived_BTD, results, parts = carry
        turn = time - (stage - span.first)
        part = jnp.clip(turn, 0, count - 1)
        is_busy = (turn >= 0) & (turn < count)
        given_BTD = jnp.where(stage == span.first, inputs[part], arrived_BTD)
        own = jax.tree.map(lambda cut, given: part_of(cut, given, part), steps, step)
        run = partial(_run_own, config, backend, cycle, layers, span, blocks, adapters, stage, Held(0, count, part))
        hidden_BTD, parts = run((given_BTD, parts), own, is_busy)
        is_result = is_busy & (stage == span.last)
        results = results.at[part].set(jnp.where(is_result, hidden_BTD, results[part]))
        following = [(each, each + 1) for each in range(span.first, span.last)]
        arrived_BTD = jax.lax.ppermute(hidden_BTD, PIPELINE, following) if following else hidden_BTD
        return (arrived_BTD, results, parts), None

    carry = (jnp.zeros_like(inputs[0]), jnp.zeros_like(inputs), parts)
    (_, results, parts), _ = jax.lax.scan(tick, carry, jnp.arange(schedule.ticks, dtype=jnp.int32))
    results = jax.lax.psum(jnp.where(stage == span.last, results, 0), PIPELINE)
    joined = jax.tree.map(
        lambda leaf, whole: _join(_apart(leaf, count), 1, shards) if _has_layers(whole) else leaf,
        parts,
        cache,
    )
    return _join(results, 0, shards), joined


def _run_own(
    config: DecoderConfig,
    backend: Backend,
    cycle: Cycle,
    layers: range,
    span: _Span,
    blocks: Params,
    adapters: Params | None,
    stage: jax.Array,
    held: Held,
    carry: Carry,
    step: Step,
    is_busy: jax.Array,
) -> Carry:
    """Run the stage's layers of the range on one microbatch; an idle stage changes nothing."""
    places = [index_in_kind(config, cycle.start + offset) for offset in range(cycle.period)]
    kinds = [kind for kind, _ in places]
    repeats = cycle.repeats // backend.stages
    before = stage * repeats
    spans = tuple(held._replace(first=before * kinds.count(kind)) for kind in range(len(config.kinds)))
    low, high = (jnp.asarray(each, jnp.int32)[stage] for each in (span.lows, span.highs))

    def advance(carry: Carry, turn: jax.Array) -> tuple[Carry, None]:
        is_inside = is_busy & (low + turn < high)
        repeat = jnp.minimum(low + turn, repeats - 1)
        for offset, (kind, first) in enumerate(places):
            layer = cycle.start + (before + repeat) * cycle.period + offset
            is_run = is_inside & (layer >= layers.start) & (layer < layers.stop)
            params = block_of(stack_of(blocks, cycle, offset), repeat, backend.reads_live_blocks)
            params = adapted(params, adapters, jnp.clip(layer - layers.start, 0, len(layers) - 1))
            index = first + (before + repeat) * kinds.count(kind)
            placements = tuple(_kept_if(is_run, placement) for placement in step.placements)
            hidden_BTD, _ = carry
            own = step._replace(placements=placements, held=spans)
            carry = apply_block(config, backend, kind, params, carry, index, own)
            carry = jnp.where(is_run, carry[0], hidden_BTD), carry[1]
        return carry, None

    carry, _ = jax.lax.scan(advance, carry, jnp.arange(span.most, dtype=jnp.int32))
    return carry


def _kept_if(is_run: jax.Array, placement: Placement) -> Placement:
    return placement._replace(slots_BT=jnp.where(is_run, placement.slots_BT, _NOWHERE))


def _span(cycle: Cycle, stages: int, start: int, stop: int) -> _Span:
    """Return the whole repeats that each stage runs to cover layers ``start .. stop - 1``."""
    first, last = (start - cycle.start) // cycle.period, (stop - 1 - cycle.start) // cycle.period
    repeats = cycle.repeats // stages
    before_S = np.arange(stages) * repeats
    lows, highs = np.clip(first - before_S, 0, repeats), np.clip(last + 1 - before_S, 0, repeats)
    return _Span(lows, highs, int((highs - lows).max()), first // repeats, last // repeats)


def _row_shards(backend: Backend, rows: int) -> int:
    """Return the number of devices that split the rows."""
    data = 1 if backend.mesh is None else backend.mesh.shape[DATA]
    return data if rows % data == 0 else 1


def _cut(leaf: jax.Array, axis: int, count: int, shards: int) -> jax.Array:
    """Split rows into microbatches, a new axis before the rows; each microbatch has rows of every device."""
    lead, rows, rest = leaf.shape[:axis], leaf.shape[axis], leaf.shape[axis + 1 :]
    if count == 1:
        return leaf.reshape(*lead, 1, rows, *rest)
    apart = leaf.reshape(*lead, shards, count, rows // shards // count, *rest)
    return jnp.moveaxis(apart, axis + 1, axis).reshape(*lead, count, rows // count, *rest)


def _join(leaf: jax.Array, axis: int, shards: int) -> jax.Array:
    """Undo `_cut`."""
    lead, (count, rows), rest = leaf.shape[:axis], leaf.shape[axis : axis + 2], leaf.shape[axis + 2 :]
    if count == 1:
        return leaf.reshape(*lead, rows, *rest)
    apart = leaf.reshape(*lead, count, shards, rows // shards, *rest)
    return jnp.moveaxis(apart, axis, axis + 1).reshape(*lead, count * rows, *rest)


def _merge(leaf: jax.Array) -> jax.Array:
    # Not -1: a buffer may have no lanes.
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _apart(leaf: jax.Array, count: int) -> jax.Array:
    """Undo `_merge` of microbatches."""
    return leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])


def _has_layers(leaf: Any) -> bool:
    """Tell whether an array is a buffer ``[L, B, ...]``; a cache's other arrays have no layers."""
    return leaf.ndim >= 4


def _layers_first(leaf: Any) -> PartitionSpec:
    return PartitionSpec(PIPELINE) if _has_layers(leaf) else PartitionSpec()


def _num_bytes(leaves: list[Any]) -> int:
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
