"""One batch of requests from prompt to last token: the host's side of the device loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.layouts import CropLayout
from jaxinfer.cache.slots import slots_for
from jaxinfer.decoding.cropping import begun_at, block_begins
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import FIXED_CHUNK, Programs
from jaxinfer.decoding.rope_crossing import crossed_lengths, reachable_lengths
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.notation import Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams

_MIN_PROMPT_BUCKET = 16
_MIN_CACHE_BUCKET = 128


@dataclass(frozen=True)
class Request:
    """One row: a prompt's ids, how its tokens are drawn, and which of the prompt's samples it is.

    ``max_length`` bounds prompt and output together, in tokens. ``adapter`` is the number of the loaded adapter, 0 for
    none.
    """

    prompt: Sequence[int]
    max_length: int
    sampling: SamplingParams
    sample: int = 0
    adapter: int = 0


@dataclass(frozen=True)
class RowCounts:
    """A row's counters after its batch has run; see `DecodeState`.

    ``first_tokens`` of the new tokens came without a step: prefill drew them. ``drafted_ahead`` of the steps verified
    drafts that were there before the step before had ended (`jaxinfer.decoding.ahead`).
    """

    new_tokens: int
    steps: int
    target_passes: float
    drafted: int
    accepted: int
    accepted_by_depth: tuple[int, ...]
    first_tokens: int = 1
    drafted_ahead: int = 0


class RunningBatch:
    """Prefills at once, then decodes as far as `advance` is told; rows that pad the batch have no request.

    Rows that outgrow the length their cache was rotated for wait there until no other row runs, and then go on from a
    new cache (see `jaxinfer.decoding.rope_crossing`).
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: Strategy,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        max_len: int,
        num_rows: int | None = None,
    ) -> None:
        self._programs, self._params, self._strategy = programs, params, strategy
        self._requests = list(requests)
        place = programs.partitioner
        num_padding = place.num_rows(num_rows or len(requests)) - len(requests)
        prompts = [list(request.prompt) for request in requests] + [[]] * num_padding
        sampling = [request.sampling for request in requests] + [SamplingParams()] * num_padding
        samples = [request.sample for request in requests] + [0] * num_padding
        config, backend, layout = programs.decoder.config, programs.decoder.backend, programs.layout
        self._contexts_B = np.array([len(prompt) for prompt in prompts], np.int32)
        begin_B = block_begins(config, layout, self._contexts_B)
        num_tokens = prompt_bucket(int((self._contexts_B - begin_B).max()), backend)
        headroom = step_headroom(strategy, backend)
        self._limits_B = np.array([request.max_length for request in requests] + [0] * num_padding, np.int32)
        self._reach_B = reachable_lengths(config, self._contexts_B, self._limits_B, layout)
        num_slots = max(
            prompt_bucket(int(self._contexts_B.max()), backend),
            cache_bucket(max(request.max_length for request in requests), headroom, max_len),
            *(
                prompt_bucket(length, backend)
                for length in crossed_lengths(config, self._contexts_B, self._limits_B, layout)
            ),
        )
        strategy.check_slots(num_slots)
        state = initial_state(
            prompts,
            (self._reach_B - self._contexts_B).tolist(),
            num_slots,
            strategy.max_depth,
            begun_at(self._create_cache(len(prompts), num_slots, headroom), jax.device_put(begin_B)),
            sampling_arrays(sampling, samples, eos_token_ids, config.num_tokens),
            np.array([-1 if params.grammar is None else 0 for params in sampling], np.int32),
            np.array([request.adapter for request in requests] + [0] * num_padding, np.int32),
        )
        self.prefill_bubble, self.decode_bubble = (
            programs.bubble(params, state.cache, len(prompts), tokens) for tokens in (num_tokens, headroom)
        )
        self._compile_seconds_before = programs.compile_seconds
        began = time.perf_counter()
        self._state, self._memory = self._prefill(num_tokens, place.place_batch(state))
        self._read = [len(request.prompt) for request in requests]
        self._refresh()
        self.prefill_seconds = time.perf_counter() - began - self.compile_seconds
        self.decode_seconds = 0.0

    @property
    def compile_seconds(self) -> float:
        """The time that this batch has spent compiling; not part of the other times."""
        return self._programs.compile_seconds - self._compile_seconds_before

    @property
    def done(self) -> bool:
        """Tell whether every row has finished."""
        return bool((self._finished_B & ~self._waiting_B).all())

    def finished(self, row: int) -> bool:
        """Tell whether a row has finished."""
        return bool(self._finished_B[row] & ~self._waiting_B[row])

    def new_tokens(self) -> list[list[int]]:
        """Return, for each request, the tokens that came since the last call."""
        tokens_BS = self._fetch(self._state.tokens_BS)
        news = []
        for row, length in enumerate(self._lengths_B[: len(self._requests)]):
            news.append(tokens_BS[row, self._read[row] : length].tolist())
            self._read[row] = int(length)
        return news

    def advance(self, max_steps: int) -> None:
        """Run at most ``max_steps`` steps on the device, and first compute the cache anew for rows that wait for it."""
        if self._waiting_B.any() and self._finished_B.all():
            self._renew_cache()
        compiled_before, began = self.compile_seconds, time.perf_counter()
        self._state, self._memory = self._decode(max_steps)
        self._refresh()
        self.decode_seconds += time.perf_counter() - began - (self.compile_seconds - compiled_before)

    def stop(self, rows: Sequence[int]) -> None:
        """End rows from outside: a stop string was found in their text."""
        if rows:
            finished_B = self._finished_B.copy()
            finished_B[list(rows)] = True
            self._finished_B = finished_B
            self._state = self._state._replace(finished_B=self._place(finished_B))
            self._limits_B[list(rows)] = 0
            self._waiting_B[list(rows)] = False

    def log_probabilities(self, row: int, num_tokens: int) -> list[float]:
        """Return the log-probabilities of a row's first ``num_tokens`` output tokens, zeros if it asked for none."""
        start = len(self._requests[row].prompt)
        return self._fetch(self._state.logprobs_BS)[row, start : start + num_tokens].tolist()

    def from_draft(self, row: int) -> list[bool]:
        """Tell for each output token of a row so far whether a draft gave it, or else the target alone."""
        start, end = len(self._requests[row].prompt), int(self._lengths_B[row])
        return self._fetch(self._state.from_draft_BS)[row, start:end].tolist()

    def counts(self, row: int) -> RowCounts:
        """Return a row's counters."""
        state = self._state
        counted = (state.steps_B, state.passes_B, state.drafted_B, state.accepted_B, state.accepted_by_depth_BM)
        steps_B, passes_B, drafted_B, accepted_B, accepted_by_depth_BM = self._fetch(counted)
        return RowCounts(
            new_tokens=int(self._lengths_B[row]) - len(self._requests[row].prompt),
            steps=int(steps_B[row]),
            target_passes=float(passes_B[row]),
            drafted=int(drafted_B[row]),
            accepted=int(accepted_B[row]),
            accepted_by_depth=tuple(accepted_by_depth_BM[row].tolist())[: self._strategy.max_depth],
        )

    def _create_cache(self, batch: int, num_slots: int, headroom: int) -> LayeredCache:
        decoder, context = self._programs.decoder, self._programs.decoder.config.max_position
        if isinstance(self._programs.layout, CropLayout):
            needed = max(prompt_bucket(context, decoder.backend), context + headroom)
            num_slots = min(num_slots, slots_for(needed))
        return self._programs.create_cache(batch, num_slots, headroom, self._strategy.features)

    def _prefill(self, num_tokens: int, state: DecodeState) -> tuple[DecodeState, Any]:
        return self._programs.prefill(self._strategy, num_tokens, self._params, state)

    def _decode(self, max_steps: int) -> tuple[DecodeState, Any]:
        return self._programs.decode(self._strategy, self._params, self._state, self._memory, max_steps)

    def _fetch(self, arrays: Any) -> Any:
        return self._programs.partitioner.fetch(arrays)

    def _place(self, values_B: np.ndarray) -> jax.Array:
        # A copy, as the state is given away.
        return self._programs.partitioner.place_batch(jnp.array(values_B))

    def _refresh(self) -> None:
        finished_B, lengths_B = self._fetch((self._state.finished_B, self._state.lengths_B))
        self._finished_B, self._lengths_B = finished_B, lengths_B
        # A row that was stopped from outside has no limit left to wait for.
        self._waiting_B = finished_B & (lengths_B == self._reach_B) & (lengths_B < self._limits_B)
        if self._waiting_B.any():
            tokens_BS, stop_ids_BE = self._fetch((self._state.tokens_BS, self._state.sampling.stop_ids_BE))
            last_B1 = np.take_along_axis(tokens_BS, lengths_B[:, None] - 1, axis=1)
            self._waiting_B &= ~(stop_ids_BE == last_B1).any(axis=1)

    def _renew_cache(self) -> None:
        """Fill the cache for the texts as long as they are now; nothing is drawn, as every row counts as finished."""
        waiting_B = self._waiting_B
        compiled_before, began = self.compile_seconds, time.perf_counter()
        self._contexts_B = np.where(waiting_B, self._lengths_B, self._contexts_B)
        config, backend, layout = self._programs.decoder.config, self._programs.decoder.backend, self._programs.layout
        self._reach_B = reachable_lengths(config, self._contexts_B, self._limits_B, layout)
        begin_B = block_begins(config, layout, self._contexts_B)
        num_tokens = prompt_bucket(int((self._lengths_B - begin_B)[waiting_B].max()) - 1, backend)
        state = self._state._replace(
            cache=begun_at(self._state.cache, self._place(begin_B)),
            context_lengths_B=self._place(np.maximum(self._contexts_B, 1)),
            limits_B=self._place(self._reach_B),
        )
        state, self._memory = self._prefill(num_tokens, state)
        self._state = state._replace(finished_B=self._place(~waiting_B))
        self._finished_B, self._waiting_B = ~waiting_B, np.zeros_like(waiting_B)
        self.prefill_seconds += time.perf_counter() - began - (self.compile_seconds - compiled_before)


def prompt_bucket(length: int, backend: Backend | None = None) -> int:
    """Return the number of tokens that a prompt of this length is padded to for prefill: a power of two.

    It is a whole number of chunks where the ``backend`` has fixed rows.
    """
    least = _MIN_PROMPT_BUCKET if backend is None or backend.fixed_rows == 1 else FIXED_CHUNK
    return max(least, 1 << max(length - 1, 0).bit_length())


def pad_texts(texts: Sequence[Sequence[int]], backend: Backend) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Return whole texts as a program takes them, filled up on the right, and their lengths."""
    lengths_B = np.array([len(text) for text in texts], np.int32)
    tokens_BT = np.zeros((len(texts), prompt_bucket(int(lengths_B.max()), backend)), np.int32)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text)] = text
    return tokens_BT, lengths_B


def cache_bucket(length: int, headroom: int, max_len: int) -> int:
    """Return the number of cache slots for texts of ``length``: a power of two or halfway between two of them.

    Plain attention reads every slot, so a finer grid than that of prompts pays; ``max_len`` bounds it.
    """
    needed = length + headroom
    power = max(_MIN_CACHE_BUCKET, 1 << (needed - 1).bit_length())
    bucket = power * 3 // 4 if needed <= power * 3 // 4 and power > 2 * _MIN_CACHE_BUCKET else power
    return min(bucket, slots_for(max_len + headroom))
