"""What every request passes first: its key is checked, and its answer is counted."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.http.answers import error_response
from jaxinfer.server.served import Served

# Nothing of the model is told there: a load balancer has no key, and the page asks for one.
OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/health", "/ready"})


class Gate:
    """Lets requests with a key through to the application."""

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

        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if scope["path"] not in OPEN_PATHS and not self._served.options.keys.allow(authorization):
            error = ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                # What is not read of the body would be taken for the next request.
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
            self._served.metrics.count_error("invalid_api_key")
            await error_response(error)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)
