"""One batch of tree searches from prompts to texts: the host's side of their programs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.batch import Request, RowCounts, RunningBatch
from jaxinfer.decoding.host_calls import HostCalls
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.search.step import prefill_search, search_step
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.models.decoder import Decoder
from jaxinfer.notation import Params

# From rows, their new tokens with a candidate's, and whether those are whole: what each is worth.
Value = Callable[[list[int], list[list[int]], list[bool]], Sequence[float]]


class SearchBatch(RunningBatch):
    """Runs as every batch does, but each step is a search; ``value`` says what candidates are worth."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: TreeSearch,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        max_len: int,
        num_rows: int | None = None,
        value: Value | None = None,
    ) -> None:
        # Programs are compiled for the options alone: they call what scores by its number, and are given a head.
        self._options, self._value = replace(strategy, scorer=None, value="", params=None), value
        self._texts: list[list[int]] = [[] for _ in requests]
        super().__init__(programs, params, strategy, requests, eos_token_ids, max_len, num_rows)

    def advance(self, max_steps: int) -> None:
        """Run searches of about ``max_steps`` steps in all, one at the least."""
        super().advance(max_steps)
        for row, request in enumerate(self._requests):
            start, end = len(request.prompt), int(self._lengths_B[row])
            known = start + len(self._texts[row])
            if end > known:
                self._texts[row] += self._fetch(self._state.tokens_BS)[row, known:end].tolist()

    def counts(self, row: int) -> RowCounts:
        """Return a row's counters: a search is a step, and its passes are those of all its simulations."""
        return replace(super().counts(row), first_tokens=0)

    def _create_cache(self, batch: int, num_slots: int, headroom: int) -> LayeredCache:
        # With room for all of the text, layers with a window have slots by position too, not a ring.
        return super()._create_cache(batch, num_slots, num_slots)

    def _prefill(self, num_tokens: int, state: DecodeState) -> tuple[DecodeState, Any]:
        function = partial(prefill_search, self._programs.decoder, num_tokens)
        return self._programs.run(("prefill_search", num_tokens), function, (1,), self._params, state)

    def _decode(self, max_steps: int) -> tuple[DecodeState, Any]:
        calls, value = self._programs.host_calls, self._value
        number = 0 if value is None else calls.open(self._scores)
        name, head = ("search", self._options, value is None), self._strategy.parameters
        function = partial(_search, self._programs.decoder, self._options, None if value is None else calls)
        try:
            found = self._programs.run(
                name, function, (1, 2), self._params, self._state, self._memory, np.int32(number), head
            )
            jax.block_until_ready(found)
            calls.check(number)
        finally:
            calls.close(number)
        return found

    def _scores(self, asks_B: np.ndarray, tokens_BM: np.ndarray, counts_B: np.ndarray, ended_B: np.ndarray) -> Any:
        """Return what the candidates of rows that search are worth, and zeros for others; called by the program."""
        rows = [row for row in range(len(self._requests)) if asks_B[row]]
        texts = [self._texts[row] + tokens_BM[row, : counts_B[row]].tolist() for row in rows]
        values_B = np.zeros(len(asks_B), np.float32)
        if rows and self._value is not None:
            values_B[rows] = self._value(rows, texts, [bool(ended_B[row]) for row in rows])
        return values_B


def _search(
    decoder: Decoder,
    strategy: TreeSearch,
    calls: HostCalls | None,
    params: Params,
    state: DecodeState,
    lacks_B: Any,
    number: Any,
    head: Any,
) -> tuple[DecodeState, Any]:
    score = None if calls is None else partial(calls.scores_B, number)
    return search_step(decoder, strategy, score, head or None, params, state, lacks_B)
