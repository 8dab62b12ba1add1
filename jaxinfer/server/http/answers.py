"""Answers as HTTP: JSON objects and errors."""

from typing import Any

from starlette.responses import Response

from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.http.json_text import write_json


def json_response(value: Any, status: int = 200) -> Response:
    """Return a JSON object."""
    return Response(write_json(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return an error in OpenAI's form."""
    return Response(write_json(error.body), error.status, error.headers, media_type="application/json")
