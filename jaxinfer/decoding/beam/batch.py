"""One batch of beam searches from prompts to texts: the host's side of their device loop."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.batch import Request, RowCounts, cache_bucket, prompt_bucket
from jaxinfer.decoding.beam.rule import num_candidates, score_dtype, search_rule
from jaxinfer.decoding.beam.state import initial_beams
from jaxinfer.decoding.beam.step import prefill_beams, renew_beams, run_beams
from jaxinfer.decoding.programs import Programs, prefill_chunk
from jaxinfer.decoding.rope_crossing import crossed_lengths, reachable_lengths
from jaxinfer.decoding.strategies.beam import BeamSearch
from jaxinfer.models.decoder import create_cache
from jaxinfer.notation import Params
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams


class BeamBatch:
    """Prefills at once, then searches as far as `advance` is told; searches that pad the batch have no request.

    A request whose ``sample`` is k asks for the k-th best text of its prompt. Requests for the same prompt stand side
    by side and share one search, and so its counters. No text is known before its search has ended.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: BeamSearch,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        max_len: int,
        num_searches: int | None = None,
    ) -> None:
        self._programs, self._params, self._width = programs, params, strategy.width
        self._requests = list(requests)
        begins = [at == 0 or request.sample == 0 for at, request in enumerate(requests)]
        self._search_of = (np.cumsum(begins) - 1).tolist()
        searched = [request for request, is_first in zip(requests, begins) if is_first]
        place = programs.partitioner
        num_padding = place.num_rows(max(num_searches or 0, len(searched))) - len(searched)
        prompts = [list(request.prompt) for request in searched] + [[]] * num_padding
        sampling = [request.sampling for request in searched] + [SamplingParams()] * num_padding
        limits_B = np.array([request.max_length for request in searched] + [0] * num_padding, np.int32)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        config, backend = programs.decoder.config, programs.decoder.backend
        num_tokens = prompt_bucket(int(lengths_B.max()))
        num_slots = max(
            num_tokens,
            cache_bucket(int(limits_B.max()), strategy.headroom, max_len),
            *(prompt_bucket(length) for length in crossed_lengths(config, lengths_B, limits_B)),
        )
        self._num_candidates = num_candidates(strategy, eos_token_ids, config.num_tokens)
        self._rule = place.place(search_rule(strategy))
        state = initial_beams(
            prompts,
            limits_B,
            reachable_lengths(config, lengths_B, limits_B),
            strategy.width,
            num_slots,
            LayeredCache(()),  # prefill makes it, out of one row a prompt
            sampling_arrays(sampling, [0] * len(prompts), eos_token_ids, config.num_tokens),
            score_dtype(backend),
            np.array([request.adapter for request in searched] + [0] * num_padding, np.int32),
        )
        self._compile_seconds_before = programs.compile_seconds
        self._is_told = [False] * len(self._requests)
        self.prefill_seconds = self.decode_seconds = 0.0
        began = time.perf_counter()
        self._state = self._run(
            prefill_beams,
            (num_tokens, prefill_chunk(backend, num_tokens), self._num_candidates),
            2,
            params,
            self._rule,
            place.place_batch(state),
        )
        cache = jax.eval_shape(lambda: create_cache(config, len(prompts), num_slots, backend, headroom=1))
        self.prefill_bubble = programs.bubble(params, cache, len(prompts), num_tokens)
        self.decode_bubble = programs.bubble(params, self._state.cache, len(prompts) * strategy.width, 1)
        self._refresh()
        self.prefill_seconds = time.perf_counter() - began - self.compile_seconds

    @property
    def compile_seconds(self) -> float:
        """The time that this batch has spent compiling; not part of the other times."""
        return self._programs.compile_seconds - self._compile_seconds_before

    @property
    def done(self) -> bool:
        """Tell whether every search has ended."""
        return bool(self._done_B.all())

    def finished(self, row: int) -> bool:
        """Tell whether the search of a request has ended."""
        return bool(self._done_B[self._search_of[row]])

    def new_tokens(self) -> list[list[int]]:
        """Return, for each request, all tokens of its text when its search has ended, and none before or again."""
        news: list[list[int]] = [[] for _ in self._requests]
        for row, request in enumerate(self._requests):
            if self.finished(row) and not self._is_told[row]:
                self._is_told[row] = True
                text_S = self._fetch(self._state.ended.tokens_BWS)[self._search_of[row], request.sample]
                news[row] = text_S[len(request.prompt) : self._length(row)].tolist()
        return news

    def advance(self, max_steps: int) -> None:
        """Run at most ``max_steps`` steps on the device, and first compute the cache anew for searches that wait."""
        compiled_before, began = self.compile_seconds, time.perf_counter()
        if (self._done_B | self._waits_B).all() and self._waits_B.any():
            num_tokens = prompt_bucket(int(self._fetch(self._state.lengths_B)[self._waits_B].max()) - 1)
            chunk = prefill_chunk(self._programs.decoder.backend, num_tokens)
            self._state = self._run(renew_beams, (num_tokens, chunk), 1, self._params, self._state)
        static, steps = (self._num_candidates,), np.int32(max_steps)
        self._state = self._run(run_beams, static, 2, self._params, self._rule, self._state, steps)
        self._refresh()
        self.decode_seconds += time.perf_counter() - began - (self.compile_seconds - compiled_before)

    def stop(self, rows: Sequence[int]) -> None:
        """Leave the searches as they are: a text is known when it has ended, so there is nothing to stop."""

    def log_probabilities(self, row: int, num_tokens: int) -> list[float]:
        """Return the log-probabilities of the first ``num_tokens`` tokens of a request's text."""
        request = self._requests[row]
        logprobs_S = self._fetch(self._state.ended.logprobs_BWS)[self._search_of[row], request.sample]
        return logprobs_S[len(request.prompt) :][:num_tokens].tolist()

    def from_draft(self, row: int) -> list[bool]:
        """Tell for each token of a request's text whether a draft gave it: none has."""
        return [False] * self.counts(row).new_tokens

    def score(self, row: int) -> float:
        """Return what a request's text was ranked by: its log-probability / length ** length_penalty."""
        return float(self._fetch(self._state.ended.scores_BW)[self._search_of[row], self._requests[row].sample])

    def counts(self, row: int) -> RowCounts:
        """Return a request's counters; every step reads the target once, for all texts of the search."""
        steps = int(self._fetch(self._state.steps_B)[self._search_of[row]])
        return RowCounts(
            new_tokens=self._length(row) - len(self._requests[row].prompt),
            steps=steps,
            target_passes=float(steps),
            drafted=0,
            accepted=0,
            accepted_by_depth=(),
        )

    def _length(self, row: int) -> int:
        return int(self._fetch(self._state.ended.lengths_BW)[self._search_of[row], self._requests[row].sample])

    def _fetch(self, arrays: Any) -> Any:
        return self._programs.partitioner.fetch(arrays)

    def _refresh(self) -> None:
        self._done_B, self._waits_B = self._fetch((self._state.done_B, self._state.waits_B))

    def _run(self, function: Callable[..., Any], static: tuple[int, ...], donated: int, *arguments: Any) -> Any:
        bound = partial(function, self._programs.decoder, *static)
        return self._programs.run((function.__name__, *static), bound, (donated,), *arguments)
