"""What an engine of beam searches runs on the device: a search's entry, and a window of steps.

A search is one row of what the device holds, with all of its running texts. Their tables of pages come from the host
each time, as those of other rows; a window changes them, and its report has what they are then.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.paged import PagedCache
from jaxinfer.decoding.beam.state import BeamState, SearchRule, follow_parents
from jaxinfer.decoding.beam.step import beam_step, extend
from jaxinfer.engine.programs import NO_CACHE, Pools, Rows, cache_of, on_own_devices, pools_of
from jaxinfer.engine.row_axes import put_batch, take_batch
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Int, Params


class BeamReport(NamedTuple):
    """What searches are like after a window or an entry; nothing that runs later consumes it.

    ``tables_BWX`` are the pages of their rows, ``best_BS`` the tokens of their best running texts, all of which are
    ``lengths_B`` long. ``steps_B`` are each search's steps in the window, ``steps`` the window's.
    """

    tables_BWX: Any
    best_BS: Any
    lengths_B: Any
    done_B: Any
    waits_B: Any
    steps_B: Any
    steps: Any


def enter_search(
    decoder: Decoder,
    axes: Rows,
    num_candidates: int,
    params: Params,
    rule: SearchRule,
    pools: Pools,
    rows: Rows,
    slot: Int[Array, ""],
    tables_1WX: Int[Array, "1 W X"],
    entry: BeamState,
    hidden_1D: Any,
) -> tuple[Pools, Rows, BeamReport]:
    """Let a search begin whose prompt is in the first row's pages; ``hidden_1D`` is its last token's hidden state."""
    model = Model.adapted(decoder, params, entry.adapters_B)
    cache = cache_of(decoder.config, pools, tables_1WX[0])
    if entry.width > 1:
        # Each row gets the beginning of a page of its own.
        cache = follow_parents(cache, jnp.zeros((1, entry.width), jnp.int32), entry.lengths_B)
    logits_QV = entry.each_row(model.logits(hidden_1D))
    after = extend(decoder, rule, entry._replace(cache=cache), logits_QV, num_candidates)
    report = _report(entry, after, jnp.int32(0))
    kept = Rows(after._replace(cache=NO_CACHE), (), ())
    return pools_of(after.cache), put_batch(rows, kept, axes, slot[None]), report


def run_search_window(
    decoder: Decoder,
    axes: Rows,
    num_candidates: int,
    params: Params,
    rule: SearchRule,
    pools: Pools,
    rows: Rows,
    slots_B: Int[Array, " B"],
    tables_BWX: Int[Array, "B W X"],
    runs_B: Bool[Array, " B"],
    max_steps: Int[Array, ""],
) -> tuple[Pools, Rows, BeamReport]:
    """Run the searches of ``slots_B`` that run until one ends or waits, at most ``max_steps`` steps."""
    state: BeamState = take_batch(rows.state, axes.state, slots_B)
    ended_B = state.done_B
    state = state._replace(done_B=ended_B | ~runs_B)
    state, tables_BWX = on_own_devices((state, tables_BWX), decoder.backend)
    table_QX = tables_BWX.reshape(-1, tables_BWX.shape[2])
    state = state._replace(cache=cache_of(decoder.config, pools, table_QX))
    model = Model.adapted(decoder, params, state.each_row(state.adapters_B))

    def goes_on(carry: tuple[Any, BeamState]) -> Any:
        step, now = carry
        return (step < max_steps) & ~((now.done_B | now.waits_B) & runs_B).any()

    def advance(carry: tuple[Any, BeamState]) -> tuple[Any, BeamState]:
        step, now = carry
        return step + 1, beam_step(model, rule, now, num_candidates)

    steps, after = jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state))
    report = _report(state, after, steps)
    kept = after._replace(cache=NO_CACHE, done_B=jnp.where(runs_B, after.done_B, ended_B))
    return pools_of(after.cache), rows._replace(state=put_batch(rows.state, kept, axes.state, slots_B)), report


def _report(before: BeamState, after: BeamState, steps: Any) -> BeamReport:
    return BeamReport(
        tables_BWX=_table(after.cache).reshape(*after.scores_BW.shape, -1),
        best_BS=after.tokens_BWS[:, 0],
        lengths_B=after.lengths_B,
        done_B=after.done_B,
        waits_B=after.waits_B,
        steps_B=after.steps_B - before.steps_B,
        steps=steps,
    )


def _table(cache: LayeredCache) -> Any:
    (part, *_) = cache.parts
    assert isinstance(part, PagedCache)
    return part.table_BX
