"""Errors as clients of OpenAI's API know them: a status, and an object that says what is wrong with which field."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import (
    EngineBusy,
    EngineClosed,
    EngineError,
    JaxinferError,
    RequestCancelled,
    RequestTimedOut,
)

RETRY_SECONDS = 1


class ApiError(Exception):
    """What a request is answered with when it cannot be served.

    ``kind`` and ``code`` are OpenAI's names, ``param`` is the field that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def wrong_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error for a field's value."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def not_ready(message: str, code: str = "server_unavailable") -> ApiError:
    """Return the error of a server that takes no requests now."""
    return ApiError(
        503, message, kind="server_error", code=code, headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
    )


def from_library(error: Exception) -> ApiError:
    """Return what an exception of the library, or any other, means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusy):
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, str(error), kind="rate_limit_error", code="engine_busy", headers=headers)
    if isinstance(error, EngineClosed):
        return not_ready(str(error))
    if isinstance(error, RequestTimedOut):
        return ApiError(504, str(error), kind="server_error", code="request_timed_out")
    if isinstance(error, RequestCancelled):
        return not_ready("the request was ended by the server, which shuts down", "request_cancelled")
    if isinstance(error, EngineError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    if isinstance(error, JaxinferError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, "the server failed; its log says how", kind="server_error", code="internal_error")
