"""Pages that stay from call to call: of conversations, and of texts with a prefix that is held, only the new is run."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.batch import cache_bucket
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.assembly import make_core
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.kept_pace import KeptPace
from jaxinfer.engine.prefix import EnginePrefix, PrefixOutput, PrefixRequest
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.engine.serve_all import add_requests, drafting_of
from jaxinfer.notation import Params
from jaxinfer.results import GenerationResult, StreamPiece
from jaxinfer.text_generation import TextRequest
from jaxinfer.tokenizers import Tokenizer

_MOST_ROWS = 16
# Of a window: nobody else waits for it, and each costs what it takes to hand hundreds of arrays to a program.
_MOST_STEPS = 32
# Room for texts of so many tokens at the least, and of twice the longest: conversations grow.
_LEAST_LONGEST = 1024


class _Held(NamedTuple):
    """A prefix that is held: its tokens, and its loaded adapter, 0 for none."""

    tokens: tuple[int, ...]
    adapter: int


class KeptPages:
    """Serves one call after the other, each in its caller's thread; results are those of `LanguageModel.generate`.

    ``programs`` have a paged cache. Each row has room for a text twice as long as the longest; there is as much room
    again for texts before. A longer text, more rows, another strategy or other parameters begin with empty pages;
    prefixes that are held are then computed again. ``kept_pace`` is what all calls have learnt of what steps cost.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        max_len: int,
        eos_token_ids: Callable[[], Sequence[int]],
        tokenizer: Callable[[], Tokenizer | None],
    ) -> None:
        self._programs, self._max_len = programs, max_len
        self.kept_pace = KeptPace(programs)
        self._eos_token_ids, self._tokenizer = eos_token_ids, tokenizer
        self._lock, self._names, self._numbers = threading.RLock(), itertools.count(), itertools.count()
        self._held: dict[str, _Held] = {}
        self._core: EngineCore | None = None
        self._strategy: Strategy | None = None
        self._params: Params | None = None
        self._rows = self._longest = self._pages_held = 0
        self._waited_before, self._is_turn = 0.0, False

    @property
    def holds(self) -> bool:
        """Whether a prefix is held."""
        return bool(self._held)

    def holds_of(self, adapter: int) -> bool:
        """Tell whether a prefix of a loaded adapter is held."""
        return any(held.adapter == adapter for held in self._held.values())

    @property
    def cached_tokens(self) -> int:
        """How many tokens were found on pages and not computed, since these pages began."""
        return 0 if self._core is None else self._core.counters.cached_tokens

    def stream(self, params: Params, strategy: Strategy, request: TextRequest) -> Iterator[StreamPiece]:
        """Yield one text as it comes; the last piece carries the result."""
        pieces: list[StreamPiece] = []
        for results in self._run(params, strategy, [request], 1, pieces.append):
            yield from pieces
            pieces.clear()
            if results:
                yield StreamPiece("", result=results[0])

    def results(
        self, params: Params, strategy: Strategy, requests: Sequence[TextRequest], num_rows: int
    ) -> list[GenerationResult]:
        """Return the results of requests, of which ``num_rows`` run at a time."""
        (results,) = (results for results in self._run(params, strategy, requests, num_rows) if results)
        return results

    def hold(self, params: Params, tokens: Sequence[int], strategy: Strategy, adapter: int = 0) -> EnginePrefix:
        """Compute the beginning of later texts and keep it until it is released; ``adapter`` is that of a request."""
        with self._turn():
            name = str(next(self._names))
            self._held[name] = _Held(tuple(tokens), adapter)
            try:
                core = self._core_for(params, strategy, len(tokens) + 1, 1)
                if name not in core.scheduler.held.pinned:
                    self._pin(core, name)
            except BaseException:
                # Who was interrupted has nothing to release.
                self._release(name)
                raise
        return EnginePrefix(len(tokens), lambda: self._release(name))

    @property
    def _page_size(self) -> int:
        assert isinstance(self._programs.layout, PagedLayout)
        return self._programs.layout.page

    def _run(
        self,
        params: Params,
        strategy: Strategy,
        requests: Sequence[TextRequest],
        num_rows: int,
        callback: Callable[[StreamPiece], None] | None = None,
    ) -> Iterator[list[GenerationResult]]:
        """Yield after each step of the device: nothing, and at last the results."""
        sequences: list[EngineSequence] = []
        try:
            with self._turn():
                longest = max(each.request.max_length for each in requests)
                core = self._core_for(params, strategy, longest, num_rows)
                compiled_before = self._programs.compile_seconds
                handles = add_requests(
                    core,
                    requests,
                    strategy,
                    self._numbers,
                    eos_token_ids=self._eos_token_ids(),
                    tokenizer=self._tokenizer(),
                    now=self._now(),
                    compile_seconds=lambda: self._programs.compile_seconds - compiled_before,
                    callback=callback,
                    into=sequences,
                )
            while not all(handle.done for handle in handles):
                with self._turn():
                    core.step()
                yield []
            # Not of a text that nobody reads on: the interpreter may be about to exit.
            self.kept_pace.keep()
            yield [result for handle in handles for result in handle.results(0.0)]
        finally:
            # Of a text that nobody reads on, or that an interrupt has ended; the next step sees it.
            for sequence in sequences:
                sequence.is_cancelled = True

    def _core_for(self, params: Params, strategy: Strategy, longest: int, num_rows: int) -> EngineCore:
        """Return a core that has room; texts that run on another one end there."""
        longest = max(longest, *(len(each.tokens) + 1 for each in self._held.values()), 1)
        num_rows = max(min(num_rows, _MOST_ROWS), strategy.rows_per_prompt or 1)
        held = sum(-(-(len(each.tokens) + 1) // self._page_size) for each in self._held.values())
        has_room = longest <= self._longest and num_rows <= self._rows and held <= self._pages_held
        is_same = self._strategy is strategy and self._params is params
        if self._core is not None and is_same and has_room:
            return self._core
        roomy = max(2 * longest, _LEAST_LONGEST)
        self._longest = max(self._longest, min(cache_bucket(roomy, 0, self._max_len), self._max_len))
        self._rows = max(self._rows, num_rows)
        self._pages_held = max(self._pages_held, held)
        self._strategy, self._params, self._core = strategy, params, None
        self._core = self._make_core(params, strategy)
        for name in self._held:
            self._pin(self._core, name)
        return self._core

    def _make_core(self, params: Params, strategy: Strategy) -> EngineCore:
        headroom = step_headroom(strategy, self._programs.decoder.backend)
        of_a_row = -(-(self._longest + headroom) // self._page_size)
        config = EngineConfig(
            max_rows=self._rows,
            page_size=self._page_size,
            pages=2 * self._rows * of_a_row + self._pages_held,
            max_batch_prefill_tokens=self._rows * self._longest,
            steps_per_look=_MOST_STEPS,
            drafting=drafting_of(strategy),
        )
        core = make_core(
            self._programs,
            params,
            strategy,
            config,
            max_len=self._longest,
            eos_token_ids=self._eos_token_ids(),
            clock=self._now,
            rounds_up=True,
            kept_pace=self.kept_pace,
        )
        core.serves_calls = True
        return core

    def _pin(self, core: EngineCore, name: str) -> None:
        request, (tokens, adapter) = PrefixRequest(), self._held[name]
        core.add(
            EngineSequence(
                number=next(self._numbers),
                tokens=list(tokens),
                max_length=len(tokens),
                arrival=self._now(),
                origin=PrefixOutput(name, request),
                is_prefix=True,
                adapter=adapter,
            )
        )
        while not request.done:
            core.step()
        request.wait()

    def _release(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)
            if self._core is not None:
                self._core.release(name)

    def _now(self) -> float:
        # Compiling is no part of a request's times.
        return time.perf_counter() - self._waited_before - self._programs.waited_seconds

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock; the clock stands still while this thread waits for programs, and for no other's waits."""
        with self._lock:
            if self._is_turn:  # a callback calls again
                yield
                return
            self._is_turn = True
            self._waited_before -= self._programs.waited_seconds
            try:
                yield
            finally:
                self._waited_before += self._programs.waited_seconds
                self._is_turn = False
