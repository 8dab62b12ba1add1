"""What an engine runs on the device: a chunk of a prompt, a sequence's entry into a row, and a window of decoding.

All work on the same pools of pages, which they consume and return. Tables of pages come from the host each time, so
that the device never holds one that is out of date. A window runs on as many rows as are asked for, whichever these
are, and leaves a report that is not consumed by what runs next.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.cache.features import FeatureCache
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.paged import PagedCache, Pool
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import decode_step, draw_first
from jaxinfer.decoding.strategy import Prefilled, Strategy
from jaxinfer.engine.row_axes import num_rows, put_batch, take_batch
from jaxinfer.engine.undrafted import Undrafted
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, cache_window
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import rows_axis
from jaxinfer.ops.masks import causal_ancestors

# Of each kind of layer, and a `FeatureCache` without a table last where the drafter reads features.
Pools = tuple[Any, ...]

# Of the rows between windows: the pools are apart from them.
NO_CACHE = LayeredCache(())


class Rows(NamedTuple):
    """What the device holds of every row between windows: a `DecodeState` without its cache, and the drafter's memory.

    ``hidden_BD`` are the hidden states that current tokens were drawn from, where the drafter rests. Of beam searches
    it is a `BeamState` alone.
    """

    state: Any
    memory: Any
    hidden_BD: Any


class Report(NamedTuple):
    """What a window or an entry did to its rows; nothing that runs later consumes it.

    ``tokens_BE`` int32, ``logprobs_BE`` float32 and ``from_draft_BE`` bool hold what is new, ``counts_B`` of it.
    Counters are those of the window. ``steps`` counts the window's steps.
    """

    tokens_BE: Any
    logprobs_BE: Any
    from_draft_BE: Any
    counts_B: Any
    finished_B: Any
    steps_B: Any
    passes_B: Any
    steps_ahead_B: Any
    drafted_B: Any
    accepted_B: Any
    accepted_by_depth_BM: Any
    steps: Any


def compute_chunk(
    decoder: Decoder,
    params: Params,
    pools: Pools,
    table_1X: Int[Array, "1 X"],
    tokens_1T: Int[Array, "1 T"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    context_length: Int[Array, ""],
    adapter: Int[Array, ""],
) -> tuple[Pools, Any]:
    """Write ``count`` of T tokens to a sequence's pages from slot ``start`` on; return the last one's hidden state.

    ``adapter`` is the sequence's loaded adapter, 0 for none.
    """
    start_B, count_B = start[None], count[None]
    cache = cache_of(decoder.config, pools, table_1X)
    num_tokens = tokens_1T.shape[1]
    placements = cache.place(start_B, causal_ancestors(num_tokens)[None], count_B)
    positions_1T = start_B[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    model = Model.adapted(decoder, params, adapter[None])
    hidden_1TD, cache = model.forward(tokens_1T, positions_1T, cache, placements, context_length[None])
    return pools_of(cache), jnp.take(hidden_1TD, jnp.maximum(count - 1, 0), axis=1)


def enter(
    decoder: Decoder,
    strategy: Strategy,
    axes: Rows,
    num_tokens: int,
    params: Params,
    drafter_params: Any,
    pools: Pools,
    rows: Rows,
    slot: Int[Array, ""],
    table_1X: Int[Array, "1 X"],
    entry: DecodeState,
    hidden_1D: Any,
    draws: Bool[Array, ""],
) -> tuple[Pools, Rows, Report]:
    """Put a sequence, whose tokens are in its pages, into a row; where it ``draws``, its next token comes first.

    ``entry`` is its state of one row, without a cache; ``hidden_1D`` its last computed token's hidden state.
    ``num_tokens`` spans its tokens.
    """
    model = Model.adapted(decoder, params, entry.adapters_B)
    before = entry._replace(cache=cache_of(decoder.config, pools, table_1X))
    after = draw_first(model, before, hidden_1D[:, None], draws.astype(jnp.int32)[None])
    memory = strategy.start(model, drafter_params, after, Prefilled(hidden_1D, num_tokens))
    report = _report(before, after, 1, jnp.int32(0))
    kept = Rows(after._replace(cache=NO_CACHE), memory, hidden_1D)
    return pools_of(after.cache), put_batch(rows, kept, axes, slot[None]), report


def start_drafting(
    decoder: Decoder,
    strategy: Strategy,
    axes: Rows,
    num_tokens: int,
    params: Params,
    drafter_params: Any,
    pools: Pools,
    rows: Rows,
    slot: Int[Array, ""],
    table_1X: Int[Array, "1 X"],
) -> Rows:
    """Begin a row's memory anew, after windows in which its drafter rested; ``num_tokens`` spans its tokens."""
    row = take_batch(rows, axes, slot[None])
    state = row.state._replace(cache=cache_of(decoder.config, pools, table_1X))
    model = Model.adapted(decoder, params, state.adapters_B)
    memory = strategy.start(model, drafter_params, state, Prefilled(row.hidden_BD, num_tokens))
    return rows._replace(memory=put_batch(rows.memory, memory, axes.memory, slot[None]))


def run_window(
    decoder: Decoder,
    strategy: Strategy,
    axes: Rows,
    most_new: int,
    params: Params,
    drafter_params: Any,
    pools: Pools,
    rows: Rows,
    slots_B: Int[Array, " B"],
    table_BX: Int[Array, "B X"],
    runs_B: Bool[Array, " B"],
    max_steps: Int[Array, ""],
) -> tuple[Pools, Rows, Report]:
    """Decode the rows of ``slots_B`` that run, until one ends, at most ``max_steps`` steps.

    If one has ended in the window before, there is no step: the host looks first. ``most_new`` is the most tokens that
    a row can gain. With `Undrafted` memories rest, else hidden states.
    """
    remembers = "hidden_BD" if isinstance(strategy, Undrafted) else "memory"
    used, their_axes = (getattr(tree, remembers) for tree in (rows, axes))
    # A window of all rows takes them in their own order: a drafter's memory may be far larger than what a step reads.
    takes_all = len(slots_B) == num_rows(rows.state, axes.state)
    if takes_all:
        state, memory = rows.state, used
        place_B = jnp.argsort(slots_B)
        table_BX, runs_B = table_BX[place_B], runs_B[place_B]
    else:
        state, memory = take_batch((rows.state, used), (axes.state, their_axes), slots_B)
    ended_B = state.finished_B
    state = state._replace(finished_B=ended_B | ~runs_B)
    state, table_BX = on_own_devices((state, table_BX), decoder.backend)
    state = state._replace(cache=cache_of(decoder.config, pools, table_BX))
    model = Model.adapted(decoder, params, state.adapters_B)

    def goes_on(carry: tuple[Any, DecodeState, Any]) -> Any:
        step, now, _ = carry
        has_ended = (now.finished_B & runs_B).any()
        return (step < max_steps) & ~has_ended

    def advance(carry: tuple[Any, DecodeState, Any]) -> tuple[Any, DecodeState, Any]:
        step, now, remembered = carry
        return step + 1, *decode_step(model, strategy, drafter_params, now, remembered)

    steps, after, memory = jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state, memory))
    report = _report(state, after, most_new, steps)
    # The others run in windows of their own.
    after_B = jnp.where(runs_B, after.finished_B, ended_B)
    kept = after._replace(cache=NO_CACHE, finished_B=after_B), memory
    if takes_all:
        report = jax.tree.map(lambda leaf: leaf[slots_B] if leaf.ndim else leaf, report)
    else:
        kept = put_batch((rows.state, used), kept, (axes.state, their_axes), slots_B)
    new_state, used = kept
    return pools_of(after.cache), rows._replace(state=new_state, **{remembers: used}), report


def read_pages(pools: Pools, pages_X: Int[Array, " X"]) -> Pools:
    """Return the content of pages, ``[L, X, Z, K*H]`` of each pool."""
    return jax.tree.map(lambda pool: pool[:, pages_X], pools)


def write_pages(pools: Pools, pages_X: Int[Array, " X"], content: Pools) -> Pools:
    """Replace the content of pages; numbers past the last page are dropped."""
    return jax.tree.map(lambda pool, new: pool.at[:, pages_X].set(new, mode="drop"), pools, content)


def copy_page(pools: Pools, source: Int[Array, ""], target: Int[Array, ""]) -> Pools:
    """Replace the content of one page by another's."""
    return jax.tree.map(lambda pool: pool.at[:, target].set(pool[:, source]), pools)


def read_row(axes: Rows, rows: Rows, slot: Int[Array, ""]) -> Rows:
    """Return what the device holds of a row."""
    return take_batch(rows, axes, slot[None])


def write_row(axes: Rows, rows: Rows, slot: Int[Array, ""], row: Rows) -> Rows:
    """Replace what the device holds of a row."""
    return put_batch(rows, row, axes, slot[None])


def on_own_devices(tree: Any, backend: Backend) -> Any:
    """Split arrays of a batch by rows, as far as these split evenly over a mesh."""
    if backend.mesh is None:
        return tree
    return jax.tree.map(lambda leaf: backend.constrained(leaf, PartitionSpec(rows_axis(leaf.shape[0], backend))), tree)


def cache_of(config: DecoderConfig, pools: Pools, table_BX: Any) -> LayeredCache:
    """Return a cache on the pools' pages."""
    features = [replace(pool, table_BX=table_BX) for pool in pools if isinstance(pool, FeatureCache)]
    of_kinds = [pool for pool in pools if isinstance(pool, Pool)]
    parts = (PagedCache(*pool, table_BX, cache_window(kind)) for pool, kind in zip(of_kinds, config.kinds, strict=True))
    return LayeredCache(tuple(parts), *features)


def pools_of(cache: LayeredCache) -> Pools:
    """Return the pools of `cache_of`."""
    pools = (Pool(part.keys, part.values) for part in cache.parts if isinstance(part, PagedCache))
    return *pools, *([] if cache.features is None else [replace(cache.features, table_BX=None)])


def _report(before: DecodeState, after: DecodeState, most_new: int, steps: Any) -> Report:
    """Compare two states."""
    places_BE = before.lengths_B[:, None] + jnp.arange(most_new, dtype=jnp.int32)

    def new(array_BS: Any) -> Any:
        return jnp.take_along_axis(array_BS, places_BE, axis=1, mode="fill", fill_value=0)

    def gained(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    return Report(
        tokens_BE=new(after.tokens_BS),
        logprobs_BE=new(after.logprobs_BS),
        from_draft_BE=new(after.from_draft_BS),
        counts_B=gained("lengths_B"),
        finished_B=after.finished_B,
        steps_B=gained("steps_B"),
        passes_B=gained("passes_B"),
        steps_ahead_B=gained("steps_ahead_B"),
        drafted_B=gained("drafted_B"),
        accepted_B=gained("accepted_B"),
        accepted_by_depth_BM=gained("accepted_by_depth_BM"),
        steps=steps,
    )
