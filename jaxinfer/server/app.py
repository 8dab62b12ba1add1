"""The application: which endpoint answers which path, and what becomes of errors."""

import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxinfer.errors import JaxinferError
from jaxinfer.server.api.errors import ApiError, from_library
from jaxinfer.server.api.fields import shown
from jaxinfer.server.embeddings import Embeddings
from jaxinfer.server.endpoints import Endpoints
from jaxinfer.server.gate import Gate
from jaxinfer.server.http.answers import error_response
from jaxinfer.server.http.body import ClientGone
from jaxinfer.server.served import Served

_LOG = logging.getLogger("jaxinfer.server")

# The page may fetch from this server alone, and no other page may show it in a frame.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def make_app(served: Served) -> ASGIApp:
    """Return the ASGI application that serves a model."""
    endpoints = Endpoints(served)
    routes = [
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/responses", endpoints.responses, methods=["POST"]),
        Route("/v1/embeddings", Embeddings(served).answer, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/metrics", endpoints.metrics),
        Route("/openapi.json", endpoints.openapi),
        *(Route(path, _page_of(*file)) for path, file in _PAGE.items()),
    ]

    async def answer_error(request: Request, error: Exception) -> Response:
        known = from_library(_not_found(request, error) if isinstance(error, HTTPException) else error)
        # Of what is no error of the library's, the server writes the trace itself.
        if known.status == 500 and isinstance(error, JaxinferError):
            _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        served.metrics.count_error(known.code or known.kind)
        return error_response(known)

    async def answer_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app = Starlette(
        routes=routes,
        exception_handlers={
            ClientGone: answer_nobody,
            **dict.fromkeys((HTTPException, ApiError, JaxinferError, Exception), answer_error),
        },
    )
    app.router.redirect_slashes = False
    return Gate(app, served, frozenset(route.path for route in routes))


def _page_of(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("jaxinfer.server") / "page" / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return answer


def _not_found(request: Request, error: HTTPException) -> ApiError:
    """Return the error for a path or a method that there is not."""
    path = shown(request.url.path)
    if error.status_code == 405:
        headers = dict(error.headers or {})
        message = f"{path}: the method {shown(request.method)} is not allowed"
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, f"{path}: there is no such path", code="not_found")
