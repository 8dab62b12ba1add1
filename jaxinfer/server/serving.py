"""Runs the application on a socket until a signal ends it."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import uvicorn

from jaxinfer.errors import InvalidOption
from jaxinfer.server.app import make_app
from jaxinfer.server.http.protocol import patient_protocol
from jaxinfer.server.served import Served

# Between looks at what still runs; and for the last bytes of answers that were cut short.
_LOOK_SECONDS = 0.02
_LAST_BYTES_SECONDS = 1
# For reading requests, whose grammars may take seconds.
_THREADS = 64


class Serving:
    """One run of a server; it owns the engine, which it closes at the end.

    ``leave`` ends the process at once.
    """

    def __init__(self, served: Served, listener: socket.socket, leave: Callable[[int], object] = os._exit) -> None:
        options = served.options
        config = uvicorn.Config(
            make_app(served),
            http=patient_protocol(options.read_seconds, options.write_seconds),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=options.max_connections,
            timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
        )
        self._served, self._listener, self._leave = served, listener, leave
        self._server = _Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def run(self, on_listening: Callable[[str], None] = lambda address: None) -> None:
        """Serve until `stop`; ``on_listening`` gets the address once it answers."""
        asyncio.run(self._run(on_listening))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Take no more requests, let those that run finish within the grace time, and end; a second time: end at once.

        Any thread may call it.
        """
        if self._served.is_draining:
            self._leave(128 + number)
            return
        self._served.is_draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _run(self, on_listening: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        # More than asyncio has on a few cores, or requests whose grammars take long would keep all others waiting.
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxinfer-serve"))
        if self._served.is_draining:
            self._stopping.set()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self.stop, number)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        warming = asyncio.ensure_future(self._warm())
        while not self._server.started and not serving.done():
            await asyncio.sleep(_LOOK_SECONDS)
        on_listening(address_of(self._listener))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        self._server.should_exit = True
        await serving
        await asyncio.to_thread(self._served.engine.close, cancel=True)
        await warming

    async def _warm(self) -> None:
        try:
            await asyncio.to_thread(self._served.warm)
        except Exception as error:
            if not self._served.is_draining:
                print(f"the first request failed: {error}", file=sys.stderr, flush=True)

    async def _drain(self) -> None:
        """Wait for what runs, but not for ever; then end it."""
        live = self._served.live
        with suppress(TimeoutError):
            async with asyncio.timeout(self._served.options.grace_seconds):
                while live:
                    await asyncio.sleep(_LOOK_SECONDS)
        for generation in list(live):
            generation.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_SECONDS):
                while live:
                    await asyncio.sleep(_LOOK_SECONDS)


class _Server(uvicorn.Server):
    """A server whose signals are handled by `Serving`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise InvalidOption if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidOption(f"cannot listen on {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address at which a socket is reached."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
