"""A connection that does not wait for ever: not for a request's head, and not for a client that does not read."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """Uvicorn's HTTP with two limits: a head has to be whole, and what waits to be read has to be read, in time."""

    head_seconds: float = 30.0
    write_seconds: float = 30.0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all waiting."""
        self._head_timer = _stop(self._head_timer)
        self._write_timer = _stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; part of a head begins the wait for the rest, which more parts do not prolong."""
        super().data_received(data)
        self._watch_head()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self.write_seconds, self._abort)

    def resume_writing(self) -> None:
        """Stop waiting: the client reads."""
        super().resume_writing()
        self._write_timer = _stop(self._write_timer)

    def _watch_head(self) -> None:
        # Bytes after an answer are a body that nobody reads, or the next head.
        is_served = self.cycle is not None and not self.cycle.response_complete
        if is_served:
            self._head_timer = _stop(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._abort)

    def on_response_complete(self) -> None:
        """Leave a silent connection to its keep-alive time."""
        self._head_timer = _stop(self._head_timer)
        super().on_response_complete()

    def _abort(self) -> None:
        self.transport.abort()


def patient_protocol(head_seconds: float, write_seconds: float) -> type[PatientProtocol]:
    """Return the class of connections with these limits, as uvicorn's configuration takes it."""
    limits: dict[str, float | Callable[..., object]] = {"head_seconds": head_seconds, "write_seconds": write_seconds}
    return type("PatientProtocol", (PatientProtocol,), dict(limits))


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
