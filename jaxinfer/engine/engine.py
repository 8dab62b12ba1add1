"""Requests that come and go: continuous batching on pages, with any strategy that runs in rows."""

import atexit
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeGuard

from jaxinfer.engine.arrivals import sequences_of
from jaxinfer.engine.assembly import GroupModel, make_cores, warm_up
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.group import EngineGroup
from jaxinfer.engine.metrics import EngineMetrics, total
from jaxinfer.engine.prefix import EnginePrefix, PrefixOutput, PrefixRequest
from jaxinfer.engine.request import EngineRequest, RequestStats
from jaxinfer.engine.routing import Standing, choose_group
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.errors import EngineBusy, EngineError, InvalidOption
from jaxinfer.results import StreamPiece
from jaxinfer.text_generation import TextRequest
from jaxinfer.tokenizers import Tokenizer

Callback = Callable[[StreamPiece], None]

# Sums with times are floats, which integers can be too large for.
_MOST_PRIORITY = 2**31 - 1
_MOST_SECONDS = 10**9


class Engine:
    """Serves requests on one model, as many at a time as there are rows; `jaxinfer.LanguageModel.engine` makes one.

    A request's tokens and log-probabilities are those of `LanguageModel.generate` with the same strategy, whatever else
    runs. Use it as a context: leaving it waits for all requests, or cancels them if an exception leaves it. The groups
    of devices of a mesh's axis ``data`` have pages and a thread each, and a request is one group's. Of the processes
    that share a group, the first ``leads`` and takes requests; the others follow it.
    """

    def __init__(
        self,
        groups: Sequence[GroupModel],
        config: EngineConfig,
        *,
        max_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Callable[[], Tokenizer | None],
        make_requests: Callable[..., list[TextRequest]],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._strategy = groups[0].strategy
        if not self._strategy.runs_in_engine:
            option = " with devices=" if self._strategy.drafts_elsewhere else ""
            raise InvalidOption(f"strategy {self._strategy.name}{option} does not run in an engine: use generate")
        self.config = config
        self._max_len, self._tokenizer, self._make_requests = max_len, tokenizer, make_requests
        self._eos_token_ids, self._on_close = tuple(eos_token_ids), on_close
        self._numbers, self._names = itertools.count(), itertools.count()
        self._taking = threading.Lock()
        self._num_open = len(groups)
        lengths = {"max_len": max_len, "eos_token_ids": eos_token_ids}
        cores, self._followers = make_cores(groups, config, self._group_ended, **lengths, clock=time.monotonic)
        self._groups = [EngineGroup(core, self._group_ended) for core in cores]
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
        self._check_leads()
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
        fitting = self._fitting(sequences[0])
        request.watch(partial(_stats_of, sequences[0]))
        with self._taking:
            self._check_open()
            if sum(group.num_waiting for group in self._groups) >= self.config.max_waiting:
                raise EngineBusy(f"{self.config.max_waiting} requests wait already: try again later")
            _best_of(fitting, sequences[0]).take(request, sequences)
        return request

    def prefix(self, prompt: str | Sequence[int], *, cache_salt: str = "", adapter: str | None = None) -> EnginePrefix:
        """Compute the beginning of later prompts and keep it until it is released; return when it is there.

        It serves requests with the same ``cache_salt`` and ``adapter``.
        """
        self._check_leads()
        self._check_may_wait("prefix")
        if self.config.prefix_cache == "off":
            raise InvalidOption("prefix: the engine's prefix cache is off")
        check_options(cache_salt=cache_salt)
        (text,) = self._make_requests([prompt], 1, None, adapter)
        tokens = list(text.request.prompt)
        name, now, requests = str(next(self._names)), time.monotonic(), [PrefixRequest() for _ in self._groups]
        # Whichever group a request goes to has the prefix.
        sequences = [
            EngineSequence(
                number=next(self._numbers),
                tokens=tokens,
                max_length=len(tokens),
                arrival=now,
                salt=cache_salt,
                adapter=text.request.adapter,
                origin=PrefixOutput(name, request),
                is_prefix=True,
            )
            for request in requests
        ]
        for group, sequence in zip(self._groups, sequences, strict=True):
            group.core.check_fits(sequence)
        with self._taking:
            self._check_open()
            for group, request, sequence in zip(self._groups, requests, sequences, strict=True):
                group.take(request, [sequence])
        try:
            for request in requests:
                request.wait()
        except BaseException:
            # Who was interrupted has nothing to release.
            self._release(name)
            raise
        return EnginePrefix(len(tokens), lambda: self._release(name))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile, or read, every program before the first request comes, the largest ones first.

        Without it a request waits for the largest programs only, and smaller ones come in the background. ``progress``
        gets how many programs are done, and of how many. Requests are served meanwhile. A process that follows
        others compiles as they do, and returns at once.
        """
        self._check_may_wait("warm_up")
        self._check_open()
        if self.leads:
            warm_up([group.core for group in self._groups], progress)

    @property
    def longest_text(self) -> int:
        """The most tokens, prompt and output, that a request can reach now: of the context, and of the pages."""
        self._check_leads()
        return min(self._max_len, max(group.core.scheduler.held.longest_text() for group in self._groups))

    @property
    def leads(self) -> bool:
        """Whether this process takes requests; else it follows others, until they have closed their engines."""
        return bool(self._groups)

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: not once it is closed, closes or has failed."""
        return all(each.is_open for each in (*self._groups, *self._followers))

    def metrics(self) -> EngineMetrics:
        """Return what the engine is like now, of the groups of devices that this process leads."""
        self._check_leads()
        return total([group.core.metrics() for group in self._groups])

    def close(self, *, cancel: bool = False) -> None:
        """Take no more requests and wait for those that run and wait, or ``cancel`` them; twice does nothing more.

        Where it follows other processes, wait until they have closed their engines, too.
        """
        self._check_may_wait("close")
        self._end(cancel)
        atexit.unregister(self._at_exit)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for follower in self._followers:
                follower.abandon()
        self.close(cancel=error is not None)

    def _end(self, cancel: bool) -> None:
        for group in self._groups:
            group.close(cancel=cancel)
        for group in self._groups:
            group.thread.join()
        for follower in self._followers:
            follower.thread.join()

    def _cancel(self, request: EngineRequest) -> None:
        for group in self._groups:
            group.cancel(request)

    def _release(self, name: str) -> None:
        for group in self._groups:
            group.release(name)

    def _fitting(self, sequence: EngineSequence) -> list[EngineGroup]:
        """Return the groups that have the pages that a sequence may need; raise InvalidOption if there is none."""
        refusals, fitting = [], []
        for group in self._groups:
            try:
                group.core.check_fits(sequence)
                fitting.append(group)
            except InvalidOption as refusal:
                refusals.append(refusal)
        if not fitting:
            raise refusals[0]
        return fitting

    def _check_leads(self) -> None:
        if not self.leads:
            leaders = ", ".join(str(follower.leader) for follower in self._followers)
            raise EngineError(f"this process follows process {leaders}, which takes the requests: submit them there")

    def _check_open(self) -> None:
        for group in self._groups:
            group.check_open()

    def _group_ended(self) -> None:
        with self._taking:
            self._num_open -= 1
            is_last = not self._num_open
        if is_last:
            self._on_close()

    def _check_may_wait(self, what: str) -> None:
        """Refuse what waits for the engine's thread in that thread, which would wait for itself."""
        if threading.current_thread() in [group.thread for group in self._groups]:
            raise EngineError(f"{what} waits for the engine, so a callback cannot call it: call it in another thread")


def _best_of(groups: Sequence[EngineGroup], sequence: EngineSequence) -> EngineGroup:
    """Return the group that a request goes to, by one of its sequences."""
    if len(groups) == 1:
        return groups[0]
    return groups[
        choose_group(
            [
                Standing(group.core.scheduler.num_slots, group.num_sequences, group.core.cached_tokens(sequence))
                for group in groups
            ]
        )
    ]


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
