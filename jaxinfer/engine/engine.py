"""Requests that come and go: continuous batching on pages, with any strategy that runs in rows."""

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import TypeGuard

from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.arrivals import sequences_of
from jaxinfer.engine.assembly import make_core
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.prefix import EnginePrefix, PrefixOutput, PrefixRequest
from jaxinfer.engine.request import EngineRequest, RequestStats
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.errors import EngineBusy, EngineClosed, EngineError, InvalidOption
from jaxinfer.notation import Params
from jaxinfer.parallel.held import HeldPartitioner
from jaxinfer.results import StreamPiece
from jaxinfer.text_generation import TextRequest
from jaxinfer.tokenizers import Tokenizer

Callback = Callable[[StreamPiece], None]

# Sums with times are floats, which integers can be too large for.
_MOST_PRIORITY = 2**31 - 1
_MOST_SECONDS = 10**9


class Engine:
    """Serves requests on one model, as many at a time as there are rows; `jaxinfer.LanguageModel.engine` makes one.

    One thread owns the device. A request's tokens and log-probabilities are those of `LanguageModel.generate` with the
    same strategy, whatever else runs. Use it as a context: leaving it waits for all requests, or cancels them if an
    exception leaves it.
    """

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: Strategy,
        config: EngineConfig,
        *,
        max_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Callable[[], Tokenizer | None],
        make_requests: Callable[..., list[TextRequest]],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        if not strategy.runs_in_engine:
            raise InvalidOption(f"strategy {strategy.name} does not run in an engine: use generate")
        partitioner = HeldPartitioner(programs.partitioner.mesh)
        partitioner.check_axes()
        self.config = config
        self._max_len, self._tokenizer, self._make_requests = max_len, tokenizer, make_requests
        self._eos_token_ids, self._on_close = tuple(eos_token_ids), on_close
        self._programs = Programs(programs.decoder, PagedLayout(config.page_size), partitioner, programs.kept)
        self._core = make_core(
            self._programs,
            params,
            strategy,
            config,
            max_len=max_len,
            eos_token_ids=eos_token_ids,
            clock=time.monotonic,
            rounds_up=True,
        )
        self._strategy = strategy
        self._numbers, self._names = itertools.count(), itertools.count()
        self._inbox: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        # All that somebody may wait for, from the call that takes it until it has ended.
        self._live: dict[EngineRequest | PrefixRequest, list[EngineSequence]] = {}
        self._is_closing = self._is_closed = False
        self._failure = ""
        self._thread = threading.Thread(target=self._serve, name="jaxinfer-engine", daemon=True)
        self._thread.start()
        # The interpreter crashes if it ends while a thread is inside a program.
        self._at_exit = partial(_cancel_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: object = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        drafts: bool = True,
        callback: Callback | None = None,
        adapter: str | None = None,
    ) -> EngineRequest:
        """Take a request and return at once; see `LanguageModel.generate` for the prompt and its sampling.

        Of two requests that wait, the one of the higher ``priority`` comes first, until the other has waited long.
        After ``timeout`` seconds the request ends with `RequestTimedOut`. Requests of different ``cache_salt`` share no
        cached prefix. Without ``drafts`` the request is decoded plainly, whatever the engine's strategy. ``adapter``
        names one of the model's, and is only for this request. ``callback`` gets each piece of the first sample in the
        engine's thread, and must be quick: it must not wait for a result. Raises `EngineBusy` if too many requests
        wait, `EngineClosed` after `close`, and InvalidOption for what can never be served.
        """
        check_options(priority=priority, timeout=timeout, cache_salt=cache_salt, drafts=drafts, callback=callback)
        texts = self._make_requests([prompt], max_new_tokens, sampling, adapter)
        tokenizer = self._tokenizer()
        now = time.monotonic()
        request = EngineRequest(len(texts), len(texts[0].request.prompt), self._cancel)
        sequences = sequences_of(
            self._strategy,
            texts,
            request,
            self._numbers,
            eos_token_ids=self._eos_token_ids,
            tokenizer=tokenizer,
            now=now,
            shares_prompt=self.config.prefix_cache != "off",
            callback=callback,
            priority=priority,
            deadline=None if timeout is None else now + timeout,
            salt=cache_salt,
            drafts=drafts,
        )
        self._core.check_fits(sequences[0])
        request.watch(partial(_stats_of, sequences[0]))
        with self._changed:
            self._check_open()
            if len(self._core.scheduler.waiting) + len(self._inbox) >= self.config.max_waiting:
                raise EngineBusy(f"{self.config.max_waiting} requests wait already: try again later")
            self._live[request] = sequences
            self._post(lambda: [self._core.add(sequence) for sequence in sequences])
        return request

    def prefix(self, prompt: str | Sequence[int], *, cache_salt: str = "", adapter: str | None = None) -> EnginePrefix:
        """Compute the beginning of later prompts and keep it until it is released; return when it is there.

        It serves requests with the same ``cache_salt`` and ``adapter``.
        """
        self._check_may_wait("prefix")
        if self.config.prefix_cache == "off":
            raise InvalidOption("prefix: the engine's prefix cache is off")
        check_options(cache_salt=cache_salt)
        (text,) = self._make_requests([prompt], 1, None, adapter)
        tokens = list(text.request.prompt)
        request, name, now = PrefixRequest(), str(next(self._names)), time.monotonic()
        sequence = EngineSequence(
            number=next(self._numbers),
            tokens=tokens,
            max_length=len(tokens),
            arrival=now,
            salt=cache_salt,
            adapter=text.request.adapter,
            origin=PrefixOutput(name, request),
            is_prefix=True,
        )
        self._core.check_fits(sequence)
        with self._changed:
            self._check_open()
            self._live[request] = [sequence]
            self._post(lambda: self._core.add(sequence))
        try:
            request.wait()
        except BaseException:
            # Who was interrupted has nothing to release.
            self._release(name)
            raise
        return EnginePrefix(len(tokens), lambda: self._release(name))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile, or read, every program before the first request comes, the largest ones first.

        Without it a request waits for the largest programs only, and smaller ones come in the background. ``progress``
        gets how many programs are done, and of how many. Requests are served meanwhile.
        """
        self._check_may_wait("warm_up")
        with self._changed:
            self._check_open()
        self._core.warm_up(progress)

    @property
    def longest_text(self) -> int:
        """The most tokens, prompt and output, that a request can reach now: of the context, and of the pages."""
        return min(self._max_len, self._core.scheduler.longest_text())

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: not once it is closed, closes or has failed."""
        return not (self._is_closing or self._is_closed)

    def metrics(self) -> EngineMetrics:
        """Return what the engine is like now."""
        scheduler, pool = self._core.scheduler, self._core.scheduler.pool
        return EngineMetrics(
            waiting=len(scheduler.waiting),
            prefilling=len(scheduler.prefilling),
            running=len(scheduler.running),
            pages_in_use=pool.in_use,
            pages_cached=pool.cached,
            pages_free=pool.free,
            preemptions=scheduler.preemptions,
            compilations=self._programs.compilations,
            compile_seconds=self._programs.compile_seconds,
            **asdict(self._core.counters),
        )

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests and wait for those that run and wait, or ``cancel`` them; twice does nothing more."""
        self._check_may_wait("close")
        self._end(cancel)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def _end(self, cancel: bool) -> None:
        with self._changed:
            self._is_closing = True
            if cancel:
                for sequences in self._live.values():
                    for sequence in sequences:
                        sequence.is_cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _cancel(self, request: EngineRequest) -> None:
        with self._changed:
            for sequence in self._live.get(request, ()):
                sequence.is_cancelled = True
            self._changed.notify_all()

    def _release(self, name: str) -> None:
        with self._changed:
            if not self._is_closed:
                self._post(lambda: self._core.release(name))

    def _post(self, command: Callable[[], object]) -> None:
        self._inbox.append(command)  # pyright: ignore[reportArgumentType]
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closing or self._is_closed:
            raise EngineClosed(self._failure or "the engine is closed")

    def _check_may_wait(self, what: str) -> None:
        """Refuse what waits for the engine's thread in that thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise EngineError(f"{what} waits for the engine, so a callback cannot call it: call it in another thread")

    def _serve(self) -> None:
        """Run until the engine is closed and nothing is left."""
        try:
            while True:
                with self._changed:
                    commands, self._inbox = self._inbox, []
                    if not commands and self._is_closing and self._core.scheduler.is_idle:
                        break
                for command in commands:
                    command()
                did_something = self._core.step()
                self._forget_ended()
                if not did_something:
                    self._rest()
        except BaseException as error:
            self._give_up(error)
        finally:
            with self._changed:
                self._is_closing = self._is_closed = True
                self._inbox.clear()
            # Whoever keeps the closed engine does not keep the device's memory.
            self._core.drop_device()
            self._on_close()

    def _rest(self) -> None:
        """Wait for something to do: a command, a request's end from outside, or the next deadline."""
        deadline = self._core.scheduler.next_deadline()
        with self._changed:
            is_pending = self._inbox or self._is_closing
            if not is_pending and not self._core.scheduler.expired(time.monotonic()):
                left = None if deadline is None else deadline - time.monotonic()
                # Some systems cannot wait as long as a deadline may be away.
                self._changed.wait(None if left is None else min(max(0.0, left), threading.TIMEOUT_MAX))

    def _forget_ended(self) -> None:
        with self._changed:
            for request in [request for request in self._live if request.done]:
                del self._live[request]

    def _give_up(self, error: BaseException) -> None:
        """End all requests: the engine itself has failed."""
        reason = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        reason.__cause__ = error
        with self._changed:
            self._is_closing, self._failure = True, str(reason)
            requests, self._live = list(self._live), {}
        for request in requests:
            request.fail(reason)


def _cancel_at_exit(reference: "weakref.ref[Engine]") -> None:
    """Close an engine that nobody has closed."""
    engine = reference()
    if engine is not None:
        engine._end(cancel=True)


def _stats_of(sequence: EngineSequence) -> RequestStats:
    return sequence.origin.stats(sequence.cached_tokens, sequence.preemptions)


def check_options(
    *,
    priority: object = 0,
    timeout: object = None,
    cache_salt: object = "",
    drafts: object = True,
    callback: object = None,
) -> None:
    """Raise InvalidOption for what would otherwise fail in the engine's thread, and end all of its requests."""
    if timeout is not None and not (_is_within(timeout, _MOST_SECONDS, int, float) and timeout > 0):
        raise InvalidOption(f"timeout is not a number of seconds above 0 and up to {_MOST_SECONDS}")
    if not _is_within(priority, _MOST_PRIORITY, int):
        raise InvalidOption(f"priority is not a whole number within {_MOST_PRIORITY} of 0")
    if not isinstance(cache_salt, str) or not _is_unicode(cache_salt):
        raise InvalidOption(f"cache_salt={cache_salt!r} is not a text")
    if not isinstance(drafts, bool):
        raise InvalidOption(f"drafts={drafts!r} is neither True nor False")
    if callback is not None and not callable(callback):
        raise InvalidOption(f"callback={callback!r} cannot be called")


def _is_within(value: object, most: int, *kinds: type) -> TypeGuard[float]:
    """Tell whether a value is a number of these kinds, not a bool, at most so far from 0."""
    return isinstance(value, kinds) and not isinstance(value, bool) and -most <= value <= most  # pyright: ignore


def _is_unicode(text: str) -> bool:
    """Tell whether a text can be written down: a lone half of a pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
