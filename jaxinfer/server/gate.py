"""What every request passes first: its host, its key and its client's limits are checked, and its answer is counted."""

import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.http.answers import error_response
from jaxinfer.server.http.hosts import names_this_machine
from jaxinfer.server.http.rates import CLIENT
from jaxinfer.server.served import Served

# Nothing of the model is told there: a load balancer has no key, and the page asks for one.
OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/health", "/ready"})
# What is asked for there takes the device's time.
_LIMITED = "/v1/"


class Gate:
    """Lets through to the application who names this machine or has a key."""

    def __init__(self, app: ASGIApp, served: Served, paths: frozenset[str]) -> None:
        self._app, self._served, self._paths = app, served, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; there are no others than HTTP's."""
        if scope["type"] != "http":
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._served.metrics.count_response(path, message["status"])
            await send(message)

        error = self._refusal(scope)
        if error is not None:
            self._served.metrics.count_error(error.code or error.kind)
            await error_response(error)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request is not let through, None if it is; then ``scope`` has its client."""
        keys, headers = self._served.options.keys, dict(scope["headers"])
        # What is not read of a body would be taken for the next request.
        close = {"Connection": "close"}
        host = headers.get(b"host", b"").decode("latin-1")
        if not keys.are_needed and self._served.options.is_local and not names_this_machine(host):
            message = "the host is not a name of this machine: ask for localhost, or start the server with keys"
            return ApiError(403, message, kind="permission_error", code="wrong_host", headers=close)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if scope["path"] not in OPEN_PATHS and not keys.allow(authorization):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer", **close}
            return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
        scope[CLIENT] = client = keys.client(authorization)
        is_limited = scope["method"] == "POST" and scope["path"].startswith(_LIMITED)
        refusal = self._served.rates.admit(client) if is_limited else None
        if refusal is not None:
            headers = {"Retry-After": str(math.ceil(refusal.seconds)), **close}
            message = f"{refusal.reason}: try again after {math.ceil(refusal.seconds)} seconds"
            return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
        return None
