"""The device's side of an engine: pools of pages, rows, and the compiled programs that work on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.slots import slots_for
from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategy import Prefilled, Strategy
from jaxinfer.engine.programs import (
    NO_CACHE,
    Pools,
    Report,
    Rows,
    compute_chunk,
    enter,
    read_pages,
    read_row,
    run_window,
    write_pages,
    write_row,
)
from jaxinfer.engine.row_axes import row_axes
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from jaxinfer.sampling.arrays import NO_TOKEN, SamplingArrays, sampling_arrays
from jaxinfer.sampling.params import SamplingParams

# Chunks are padded to powers of two from here on.
_LEAST_CHUNK = 16
# Tables and whole prompts are padded to this many slots, or 4 times as many, or 16 times: few programs, for which a
# step looks at no more than 4 times the slots that are there.
_LEAST_SLOTS = 256


@dataclass(frozen=True)
class Entry:
    """A sequence that enters a row: its text, and how its tokens are drawn.

    It ends at ``limit`` tokens. If it ``draws``, all of its tokens are in the cache, else all but the last.
    """

    tokens: Sequence[int]
    prompt_length: int
    context_length: int
    limit: int
    draws: bool
    sampling: SamplingParams
    sample: int


@dataclass(frozen=True)
class Saved:
    """A sequence that had to make room: the content of its pages and its row, in the host's memory."""

    pages: Any
    row: Any


class Device:
    """Runs one thing after the other; only one thread may call it.

    ``num_slots`` is the longest text with what a step writes past it. All rows begin empty.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: Strategy,
        *,
        num_rows: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        most_steps: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._programs, self._params, self._strategy = programs, params, strategy
        self._num_rows, self._page_size, self._num_pages = num_rows, page_size, num_pages
        self._num_slots = slots_for(num_slots)
        self._columns = -(-num_slots // page_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._most_new = most_steps * (strategy.max_depth + 1)
        self._widths = self._sampling_widths([SamplingParams()])
        self._axes = row_axes(self._described)
        self.reset()

    def reset(self) -> None:
        """Begin with empty rows and pools."""
        config, backend = self._programs.decoder.config, self._programs.decoder.backend
        lanes = backend.cache_lanes(config.num_kv_heads * config.head_dim)

        def pool(count: int) -> Any:
            return jnp.zeros((count, self._num_pages, self._page_size, lanes), backend.cache_dtype)

        self._pools: Pools = tuple(tuple(pool(config.layers.count(kind)) for _ in range(2)) for kind in config.kinds)
        self._rows: Rows = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), self._described(self._num_rows))

    def drop(self) -> None:
        """Let go of pools and rows; `reset` makes them anew."""
        del self._pools, self._rows

    def compute(self, tokens: Sequence[int], start: int, pages: Sequence[int], context_length: int) -> Any:
        """Write tokens from slot ``start`` on to a sequence's pages; return the last one's hidden state."""
        size = max(_LEAST_CHUNK, 1 << (len(tokens) - 1).bit_length())
        tokens_1T = np.zeros((1, size), np.int32)
        tokens_1T[0, : len(tokens)] = tokens
        numbers = np.int32(start), np.int32(len(tokens)), np.int32(context_length)
        function = partial(compute_chunk, self._programs.decoder)
        arguments = self._params, self._pools, self._table([pages]), tokens_1T, *numbers
        self._pools, hidden_1D = self._programs.run(("chunk", size), function, (1,), *arguments)
        return hidden_1D

    def enter(self, slot: int, pages: Sequence[int], hidden_1D: Any, entry: Entry) -> Report:
        """Put a sequence into a row; the report has the token that it drew, if it does."""
        self._make_room_for(entry.sampling)
        num_tokens = min(_level(len(entry.tokens)), self._num_slots)
        function = partial(enter, self._programs.decoder, self._strategy, self._axes, num_tokens)
        state = self._state_of(entry)
        arguments = (
            self._params,
            self._strategy.parameters,
            self._pools,
            self._rows,
            np.int32(slot),
            self._table([pages]),
            state,
            hidden_1D,
            np.bool_(entry.draws),
        )
        name = "enter", self._strategy, num_tokens
        self._pools, self._rows, report = self._programs.run(name, function, (2, 3), *arguments)
        return jax.device_get(report)

    def run(self, slots: Sequence[int], pages: Sequence[Sequence[int]], max_steps: int, ends_early: bool) -> Report:
        """Decode rows for at most so many steps; the report has them in this order, and rows that pad it after them."""
        size = min(1 << (len(slots) - 1).bit_length(), self._num_rows)
        idle = [slot for slot in range(self._num_rows) if slot not in set(slots)][: size - len(slots)]
        runs_B = np.arange(size) < len(slots)
        function = partial(run_window, self._programs.decoder, self._strategy, self._axes, self._most_new)
        arguments = (
            self._params,
            self._strategy.parameters,
            self._pools,
            self._rows,
            np.array([*slots, *idle], np.int32),
            self._table([*pages, *([] for _ in idle)]),
            runs_B,
            np.int32(max_steps),
            np.bool_(ends_early),
        )
        name = "window", self._strategy, self._most_new
        self._pools, self._rows, report = self._programs.run(name, function, (2, 3), *arguments)
        return jax.device_get(report)

    def save(self, slot: int, pages: Sequence[int]) -> Saved:
        """Copy a sequence's pages and row to the host."""
        content = self._programs.run("read_pages", read_pages, (), self._pools, self._padded(pages, 0))
        row = self._programs.run("read_row", partial(read_row, self._axes), (), self._rows, np.int32(slot))
        return Saved(jax.tree.map(lambda array: array[:, : len(pages)], jax.device_get(content)), jax.device_get(row))

    def restore(self, slot: int, pages: Sequence[int], saved: Saved) -> None:
        """Put what `save` returned on other pages and into a row; there may be more pages than before."""
        places = self._padded(pages, self._num_pages)
        size = len(places)

        def padded(array: Any) -> Any:
            return np.pad(array, ((0, 0), (0, size - array.shape[1]), (0, 0), (0, 0)))

        content = jax.tree.map(padded, saved.pages)
        self._pools = self._programs.run("write_pages", write_pages, (0,), self._pools, places, content)
        state = saved.row.state
        # Others may have needed longer lists since.
        row = saved.row._replace(state=state._replace(sampling=_widened(state.sampling, self._widths)))
        function = partial(write_row, self._axes)
        self._rows = self._programs.run("write_row", function, (0,), self._rows, np.int32(slot), row)

    def _table(self, pages: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(len(held) for held in pages)
        columns = min(-(-_level(longest * self._page_size) // self._page_size), self._columns)
        table_BX = np.zeros((len(pages), columns), np.int32)
        for row, held in enumerate(pages):
            table_BX[row, : len(held)] = held
        return table_BX

    def _padded(self, pages: Sequence[int], fill: int) -> np.ndarray:
        """Return page numbers, as many as a power of two."""
        size = 1 << (max(len(pages), 1) - 1).bit_length()
        return np.array([*pages, *[fill] * (size - len(pages))], np.int32)

    def _state_of(self, entry: Entry) -> DecodeState:
        config = self._programs.decoder.config
        arrays = sampling_arrays([entry.sampling], [entry.sample], self._eos_token_ids, config.num_tokens)
        rows = initial_state(
            [list(entry.tokens)],
            [entry.limit - len(entry.tokens)],
            self._num_slots,
            self._strategy.max_depth,
            NO_CACHE,
            _widened(arrays, self._widths),
        )
        lengths = (np.array([length], np.int32) for length in (entry.prompt_length, entry.context_length))
        return rows._replace(**dict(zip(("prompt_lengths_B", "context_lengths_B"), lengths)))

    def _described(self, batch: int) -> Rows:
        """Describe what the device holds of so many rows."""
        decoder, strategy = self._programs.decoder, self._strategy
        one = self._state_of(Entry([0], 1, 1, 2, True, SamplingParams(), 0))
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype), one)

        def remembered(params: Params, drafter_params: Any, state: DecodeState) -> Any:
            headroom = step_headroom(strategy, decoder.backend)
            cache = create_cache(decoder.config, batch, self._num_slots, decoder.backend, headroom)
            hidden_BD = jnp.zeros((batch, decoder.config.model_dim), decoder.backend.compute_dtype)
            prefilled = Prefilled(hidden_BD, prompt_bucket(1))
            return strategy.start(Model(decoder, params), drafter_params, state._replace(cache=cache), prefilled)

        return Rows(state, jax.eval_shape(remembered, self._params, strategy.parameters, state))

    def _sampling_widths(self, sampling: Sequence[SamplingParams]) -> tuple[int, int]:
        config = self._programs.decoder.config
        arrays = sampling_arrays(sampling, [0] * len(sampling), self._eos_token_ids, config.num_tokens)
        return arrays.bias_ids_BX.shape[1], arrays.stop_ids_BE.shape[1]

    def _make_room_for(self, sampling: SamplingParams) -> None:
        """Widen the rows' lists of biases and stop tokens where a sequence needs more."""
        biases, stops = map(max, self._widths, self._sampling_widths([sampling]))
        widths = biases, stops
        if widths != self._widths:
            self._widths = widths
            state = self._rows.state
            self._rows = self._rows._replace(state=state._replace(sampling=_widened(state.sampling, widths)))


def _widened(arrays: SamplingArrays, widths: tuple[int, int]) -> SamplingArrays:
    """Pad lists of biases and stop tokens."""
    biases, stops = widths

    def padded(array: Any, width: int, fill: int | float) -> Any:
        return jnp.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

    if (arrays.bias_ids_BX.shape[1], arrays.stop_ids_BE.shape[1]) == widths:
        return arrays
    return arrays._replace(
        bias_ids_BX=padded(arrays.bias_ids_BX, biases, NO_TOKEN),
        bias_values_BX=padded(arrays.bias_values_BX, biases, 0.0),
        stop_ids_BE=padded(arrays.stop_ids_BE, stops, NO_TOKEN),
    )


def _level(slots: int) -> int:
    """Return how many slots stand for so many."""
    level = _LEAST_SLOTS
    while level < slots:
        level *= 4
    return level
