"""Answers that come in parts, as server-sent events, and clients that leave before the end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.server.http.body import ClientGone
from jaxinfer.server.http.json_text import write_json

DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def event(value: Any, *, is_typed: bool = False) -> bytes:
    """Return a value as one event, which is named by the value's ``type`` if it is typed."""
    name = f"event: {value['type']}\n".encode() if is_typed else b""
    return name + b"data: " + write_json(value) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work while the client waits; once it has gone, cancel the work and raise ClientGone.

    The request's body must have been read: what comes after it is the client's leaving.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; at the end, or when the client leaves, closes their generator and calls ``on_end``."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all."""
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send(send))
        finally:
            self._on_end()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
