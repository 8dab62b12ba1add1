"""The device's side of an engine of beam searches: each of its rows is a search with all of its running texts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.decoding.beam.rule import num_candidates, score_dtype, search_rule
from jaxinfer.decoding.beam.state import BeamState, initial_beams
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.rope_crossing import reachable_lengths
from jaxinfer.decoding.strategies.beam import BeamSearch
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.beam_programs import BeamReport, enter_search, run_search_window
from jaxinfer.engine.device import Device, Shaped, widened
from jaxinfer.engine.programs import NO_CACHE, Rows
from jaxinfer.engine.shapes import ANY_ENTRY, Entry, described, integers, table
from jaxinfer.notation import Params
from jaxinfer.sampling.arrays import sampling_arrays


class BeamDevice(Device):
    """Runs searches; ``num_rows`` are how many, and pages are lists of pages, one for each of a search's rows."""

    def __init__(self, programs: Programs, params: Params, strategy: Strategy, **options: Any) -> None:
        assert isinstance(strategy, BeamSearch)
        self._width = strategy.width
        self._rule = programs.partitioner.place(search_rule(strategy))
        vocab_size = programs.decoder.config.num_tokens
        self._num_candidates = num_candidates(strategy, options["eos_token_ids"], vocab_size)
        super().__init__(programs, params, strategy, **options)

    def enter(self, slot: int, pages: Sequence[Any], hidden_1D: Any, entry: Entry) -> BeamReport:
        """Let a search begin in a row: its prompt is in the first pages."""
        self._make_room_for(entry.sampling)
        shapes = [(self._num_slots, columns) for columns in self._columns_from(max(map(len, pages)))]
        _, columns = self._pick(self._shaped_enter, shapes)
        number, tables_1WX = np.int32(slot), table(pages, columns)[None]
        arguments = (
            self._params,
            self._rule,
            self._pools,
            self._rows,
            number,
            tables_1WX,
            self._partitioner.from_host(self._state_of(entry)),
            hidden_1D,
        )
        self._pools, self._rows, report = self._run(self._shaped_enter(self._num_slots, columns), *arguments)
        return self._partitioner.to_host(report)

    def start(self, slots: Sequence[int], pages: Sequence[Any], max_steps: int, nodes: int | None = None) -> BeamReport:
        """Begin to run searches until one ends, at most so many steps; what `read` waits for has them in this order."""
        shapes = self._window_shapes(len(slots), max(len(one) for each in pages for one in each))
        size, columns = self._pick(partial(self._shaped_window, self.strategy), shapes)
        idle = [slot for slot in range(self._num_rows) if slot not in set(slots)][: size - len(slots)]
        rows = [one for each in pages for one in each] + [[]] * (len(idle) * self._width)
        arguments = (
            self._params,
            self._rule,
            self._pools,
            self._rows,
            np.array([*slots, *idle], np.int32),
            table(rows, columns).reshape(size, self._width, columns),
            np.arange(size) < len(slots),
            np.int32(max_steps),
        )
        self._pools, self._rows, report = self._run(self._shaped_window(self.strategy, size, columns), *arguments)
        return report

    def _shaped_enter(self, num_tokens: int, columns: int) -> Shaped:
        name = "enter search", self._width, self._num_candidates
        function = partial(enter_search, self._programs.decoder, self._axes, self._num_candidates)
        config, backend = self._programs.decoder.config, self._programs.decoder.backend
        hidden_1D = jax.ShapeDtypeStruct((1, config.model_dim), backend.compute_dtype)
        entry = self._entry_shapes, self._placed(hidden_1D)
        arguments = *self._shaped_rows(self.strategy), integers(), integers(1, self._width, columns), *entry
        return Shaped(name, function, (2, 3), arguments)

    def _shaped_window(self, strategy: Strategy, size: int, columns: int) -> Shaped:
        name = "search window", self._width, self._num_candidates
        function = partial(run_search_window, self._programs.decoder, self._axes, self._num_candidates)
        runs_B = jax.ShapeDtypeStruct((size,), np.bool_)
        window = integers(size), integers(size, self._width, columns), runs_B, integers()
        return Shaped(name, function, (2, 3), (*self._shaped_rows(strategy), *window))

    def _shaped_rows(self, strategy: Strategy) -> tuple[Any, ...]:
        return self._params, self._rule, *self._held_shapes

    def _texts_within(self, columns: int) -> list[int]:
        # An entry's program is the same for all texts.
        return [self._num_slots]

    def _state_of(self, entry: Entry) -> BeamState:
        decoder = self._programs.decoder
        arrays = sampling_arrays([entry.sampling], [0], self._eos_token_ids, decoder.config.num_tokens)
        limits_1 = np.array([entry.limit], np.int32)
        lengths_1 = np.array([len(entry.tokens)], np.int32)
        return initial_beams(
            [list(entry.tokens)],
            limits_1,
            reachable_lengths(decoder.config, lengths_1, limits_1),
            self._width,
            self._num_slots,
            NO_CACHE,
            widened(arrays, self._widths),
            score_dtype(decoder.backend),
            np.array([entry.adapter], np.int32),
        )

    def _described(self, batch: int) -> Rows:
        one = described(self._state_of(ANY_ENTRY))
        state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype), one)
        return Rows(state, (), ())
