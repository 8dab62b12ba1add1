"""Reads the body of a request: no longer than allowed, and not for ever."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.http.json_text import read_json

# How much of a body that is too long is read and dropped: a client that still writes would not see the answer.
_MOST_DROPPED = 16


class ClientGone(Exception):
    """The client has closed its connection: nobody waits for an answer."""


async def read_body(request: Request, most_bytes: int, seconds: float) -> Mapping[str, Any]:
    """Return the JSON object that a request carries."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another origin can send what a form sends, but not this.
        raise ApiError(415, "content-type is not application/json", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    is_too_long = declared.isdecimal() and int(declared[:20]) > most_bytes
    if is_too_long and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_long(most_bytes)  # none of it has been sent
    try:
        async with asyncio.timeout(seconds):
            return read_json(await _read(request, most_bytes))
    except TimeoutError:
        if is_too_long:
            raise _too_long(most_bytes) from None
        message = f"the body did not come within {seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, most_bytes: int) -> bytes:
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most_bytes:
            body += part
        if size > _MOST_DROPPED * most_bytes:
            break
    if size > most_bytes:
        raise _too_long(most_bytes)
    return bytes(body)


def _too_long(most_bytes: int) -> ApiError:
    message = f"the body has more than {most_bytes} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
