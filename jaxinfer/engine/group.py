"""One group of an engine's devices: a core, and the thread that owns them."""

import threading
import time
from collections.abc import Callable

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.prefix import PrefixRequest
from jaxinfer.engine.request import EngineRequest
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.errors import EngineClosed, EngineError


class EngineGroup:
    """Serves requests on the devices of one pool of pages, until it is closed; any thread may use it.

    ``on_end`` is called in its thread once that ends.
    """

    def __init__(self, core: EngineCore, on_end: Callable[[], None]) -> None:
        self.core = core
        self._on_end = on_end
        self._inbox: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        # All that somebody may wait for, from the call that takes it until it has ended.
        self._live: dict[EngineRequest | PrefixRequest, list[EngineSequence]] = {}
        self._is_closing = self._is_closed = False
        self._failure = ""
        self.thread = threading.Thread(target=self._serve, name="jaxinfer-engine", daemon=True)
        self.thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not (self._is_closing or self._is_closed)

    @property
    def num_waiting(self) -> int:
        """How many sequences wait, and commands."""
        return len(self.core.scheduler.waiting) + len(self._inbox)

    @property
    def num_sequences(self) -> int:
        """How many sequences wait or run."""
        with self._changed:
            return sum(map(len, self._live.values()))

    def check_open(self) -> None:
        """Raise EngineClosed if it takes no requests."""
        if not self.is_open:
            raise EngineClosed(self._failure or "the engine is closed")

    def take(self, request: EngineRequest | PrefixRequest, sequences: list[EngineSequence]) -> None:
        """Let the sequences of a request wait."""
        with self._changed:
            self.check_open()
            self._live[request] = sequences
            self._post(lambda: [self.core.add(sequence) for sequence in sequences])

    def cancel(self, request: EngineRequest) -> None:
        """End a request, if it is one of this group's, after the window that runs."""
        with self._changed:
            for sequence in self._live.get(request, ()):
                sequence.is_cancelled = True
            self._changed.notify_all()

    def release(self, name: str) -> None:
        """Let a prefix go."""
        with self._changed:
            if not self._is_closed:
                self._post(lambda: self.core.release(name))

    def close(self, *, cancel: bool) -> None:
        """Take no more requests, and ``cancel`` those that there are; wait for ``thread`` afterwards."""
        with self._changed:
            self._is_closing = True
            if cancel:
                for sequences in self._live.values():
                    for sequence in sequences:
                        sequence.is_cancelled = True
            self._changed.notify_all()

    def _post(self, command: Callable[[], object]) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    def _serve(self) -> None:
        """Run until the group is closed and nothing is left."""
        try:
            while True:
                with self._changed:
                    commands, self._inbox = self._inbox, []
                    if not commands and self._is_closing and self.core.scheduler.is_idle:
                        break
                for command in commands:
                    command()
                did_something = self.core.step()
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
            self.core.drop_device()
            self._on_end()

    def _rest(self) -> None:
        """Wait for something to do: a command, a request's end from outside, or the next deadline."""
        deadline = self.core.scheduler.next_deadline()
        with self._changed:
            is_pending = self._inbox or self._is_closing
            if not is_pending and not self.core.scheduler.expired(time.monotonic()):
                left = None if deadline is None else deadline - time.monotonic()
                # Some systems cannot wait as long as a deadline may be away.
                self._changed.wait(None if left is None else min(max(0.0, left), threading.TIMEOUT_MAX))

    def _forget_ended(self) -> None:
        with self._changed:
            for request in [request for request in self._live if request.done]:
                del self._live[request]

    def _give_up(self, error: BaseException) -> None:
        """End all requests: the group itself has failed."""
        reason = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        reason.__cause__ = error
        with self._changed:
            self._is_closing, self._failure = True, str(reason)
            requests, self._live = list(self._live), {}
        for request in requests:
            request.fail(reason)
