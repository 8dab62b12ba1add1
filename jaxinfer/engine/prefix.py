"""A beginning that many prompts share, kept in the cache until its owner lets it go."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType


class EnginePrefix:
    """A prefix that stays in the cache until it is released; later prompts that begin with it skip it.

    ``tokens`` is how many tokens it has.
    """

    def __init__(self, tokens: int, release: Callable[[], None]) -> None:
        self.tokens = tokens
        self._release = release

    def release(self) -> None:
        """Let the prefix go; releasing it twice does nothing more."""
        self._release()

    def __enter__(self) -> "EnginePrefix":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PrefixRequest:
    """What waits for a prefix to be computed."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it is computed, or has failed."""
        return self._ended.is_set()

    def finish(self) -> None:
        """Tell that it is computed."""
        self._ended.set()

    def fail(self, error: Exception) -> None:
        """Tell that it cannot be computed, unless it is already."""
        if not self.done:
            self._error = error
            self._ended.set()

    def wait(self) -> None:
        """Wait until it is computed; raise its error."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


@dataclass
class PrefixOutput:
    """What a prefix's sequence leads to, by the name of its pages."""

    name: str
    request: PrefixRequest
    started: float | None = None
    prefill_seconds: float = 0.0
