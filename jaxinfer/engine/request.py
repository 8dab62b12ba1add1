"""What a caller holds of a request: its text as it comes, its results, and a way to cancel it."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from jaxinfer.errors import EngineError, InvalidOption
from jaxinfer.results import GenerationResult, StreamPiece


@dataclass(frozen=True)
class RequestStats:
    """Times of a request in seconds, None where it has not come so far.

    ``queue_seconds`` is from submission to the first computed token of the prompt, ``first_token_seconds`` from
    submission to the first token. ``token_seconds`` are when tokens came, from submission on, one entry a token.
    ``cached_tokens`` of the ``prompt_tokens`` were in the prefix cache. ``preemptions`` counts how often the request
    had to make room.
    """

    prompt_tokens: int
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    token_seconds: tuple[float, ...] = ()
    cached_tokens: int = 0
    preemptions: int = 0


class EngineRequest:
    """A request that an engine has taken; any thread may use it.

    Iterate over it, or ``async for``, for its `StreamPiece` as they come, the last of which carries the result; or wait
    for `result`. Of several samples the pieces come as they are made, the last of each with its result. Errors of the
    request are raised there.
    """

    def __init__(self, num_samples: int, prompt_tokens: int, cancel: Callable[["EngineRequest"], None]) -> None:
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: deque[StreamPiece] = deque()
        self._results: dict[int, GenerationResult] = {}
        self._num_samples = num_samples
        self._error: Exception | None = None
        self._stats: Callable[[], RequestStats] = lambda: RequestStats(prompt_tokens)
        self._listeners: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._error is not None or len(self._results) == self._num_samples

    @property
    def stats(self) -> RequestStats:
        """The times of the request so far; of several samples, the first one's."""
        return self._stats()

    def cancel(self) -> None:
        """End the request; its pages and rows are free after the window that runs."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the only result; raise TimeoutError after ``timeout`` seconds, which ends nothing."""
        if self._num_samples != 1:
            raise InvalidOption(f"result is of one sample, but n is {self._num_samples}: use results")
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[GenerationResult]:
        """Wait for the results of all samples; see `result`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
            self._raise()
            return [self._results[sample] for sample in range(self._num_samples)]

    def __iter__(self) -> Iterator[StreamPiece]:
        num_open = self._num_samples
        try:
            while num_open:
                with self._changed:
                    self._changed.wait_for(lambda: self._pieces or self.done)
                    piece = self._next()
                num_open -= piece.result is not None
                yield piece
        finally:
            if num_open:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[StreamPiece]:
        loop, has_news, num_open = asyncio.get_running_loop(), asyncio.Event(), self._num_samples

        def listen() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(has_news.set)

        self._listeners.append(listen)
        try:
            while num_open:
                with self._changed:
                    has_news.clear()
                    piece = self._next() if self._pieces or self.done else None
                if piece is None:
                    await has_news.wait()
                    continue
                num_open -= piece.result is not None
                yield piece
        finally:
            self._listeners.remove(listen)
            if num_open:
                self.cancel()

    def watch(self, stats: Callable[[], RequestStats]) -> None:
        """Ask for the stats until the request ends."""
        self._stats = stats

    def give(self, piece: StreamPiece) -> None:
        """Hand a piece to whoever iterates."""
        with self._changed:
            self._pieces.append(piece)
            self._notify()

    def finish(self, result: GenerationResult, stats: RequestStats) -> None:
        """End a sample with its result."""
        with self._changed:
            self._results[result.sample] = result
            if result.sample == 0:
                self._stats = lambda: stats
            self._pieces.append(StreamPiece("", result=result, sample=result.sample))
            self._notify()

    def fail(self, error: Exception) -> None:
        """End the request with an error; the first one stays."""
        with self._changed:
            if not self.done:
                stats = self._stats()
                self._stats = lambda: stats
                self._error = error
                self._notify()

    def _next(self) -> StreamPiece:
        if self._pieces:
            return self._pieces.popleft()
        self._raise()
        raise EngineError("the pieces of this request have been read already")

    def _raise(self) -> None:
        if self._error is not None:
            # A new one each time: several callers may wait, and each raises its own.
            error = type(self._error)(*self._error.args)
            raise error from self._error

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in list(self._listeners):
            listener()
