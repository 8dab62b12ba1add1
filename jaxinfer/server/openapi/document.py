"""The document: every path, what it takes and what it gives."""

from typing import Any

from jaxinfer import __version__
from jaxinfer.server.api.sampling import Limits
from jaxinfer.server.openapi.answers import ERRORS, SCHEMAS
from jaxinfer.server.openapi.requests import request_bodies
from jaxinfer.tokenizers import Tokenizer

# Of paths that take a body: what they do, and what they answer with.
_POSTED = {
    "/v1/chat/completions": ("Answer a conversation.", "Chat"),
    "/v1/responses": ("Answer a conversation in items.", "Response"),
    "/v1/completions": ("Continue prompts.", "Completion"),
    "/v1/embeddings": ("Embed texts.", "Embeddings"),
    "/tokenize": ("Return the ids of a text or a conversation.", "Tokens"),
    "/detokenize": ("Return the text of ids.", "Text"),
}
_STREAMED = ("Chat", "Completion", "Response")
_BODY_ERRORS, _OPEN_ERRORS, _ANY_ERRORS = tuple(ERRORS), (403,), (401, 403)


def describe(limits: Limits, tokenizer: Tokenizer, dimensions: int) -> dict[str, Any]:
    """Return the description of a server of a model: its name and limits, its tokenizer, its embeddings' length."""
    paths: dict[str, Any] = {
        path: {"post": _posted(path, body)} for path, body in request_bodies(limits, tokenizer, dimensions).items()
    }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths |= {
        "/v1/models": {"get": _got("List the model and its adapters.", "Models")},
        "/v1/models/{name}": {"get": _got("Describe a model.", "Model", 404), "parameters": [name]},
        "/health": {"get": _status("Tell whether the server lives.")},
        "/ready": {"get": _status("Tell whether requests would be served soon.")},
        "/metrics": {"get": _text("Return metrics in the form of Prometheus.", "text/plain")},
        "/openapi.json": {"get": _got("Describe the server.", None)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _posted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    summary, answer = _POSTED[path]
    content = _json(answer)
    if answer in _STREAMED:
        content["text/event-stream"] = {}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_errors(*_BODY_ERRORS)},
    }


def _got(summary: str, answer: str | None, *errors: int) -> dict[str, Any]:
    content = _json(answer) if answer else {"application/json": {"schema": {"type": "object"}}}
    ok = {"description": "The answer.", "content": content}
    return {"summary": summary, "responses": {"200": ok, **_errors(*_ANY_ERRORS, *errors)}}


def _status(summary: str) -> dict[str, Any]:
    content = _json("Status")
    answers = {"200": {"description": "Yes.", "content": content}, "503": {"description": "No.", "content": content}}
    return {"summary": summary, "security": [], "responses": {**answers, **_errors(*_OPEN_ERRORS)}}


def _text(summary: str, kind: str) -> dict[str, Any]:
    ok = {"description": "The answer.", "content": {kind: {"schema": {"type": "string"}}}}
    return {"summary": summary, "responses": {"200": ok, **_errors(*_ANY_ERRORS)}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"description": ERRORS[status], "content": _json("Error")} for status in statuses}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
