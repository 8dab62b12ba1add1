"""The form of answers and errors, as JSON schemas; they may have more than is named."""

from typing import Any

_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
_TEXT_OR_NULL, _IDS = {"type": ["string", "null"]}, {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _choices(kind: str, ends: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    choice = _object(
        index=_WHOLE, **properties, logprobs={"type": ["object", "null"]}, finish_reason={"enum": list(ends)}
    )
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_WHOLE,
        model=_TEXT,
        system_fingerprint=_TEXT,
        seed=_WHOLE,
        choices=_list(choice),
        usage=_reference("Usage"),
    )


_ENDS = ("stop", "length")
_CALL = _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(role={"const": "assistant"}, content=_TEXT_OR_NULL, refusal={"type": "null"})
_MESSAGE["properties"]["tool_calls"] = _list(_CALL)
_PART = _object(type={"const": "output_text"}, text=_TEXT)
_ITEM_ENDS = {"enum": ["completed", "incomplete"]}
_ITEMS = [
    _object(type={"const": "message"}, id=_TEXT, status=_ITEM_ENDS, role={"const": "assistant"}, content=_list(_PART)),
    _object(type={"const": "function_call"}, id=_TEXT, status=_ITEM_ENDS, call_id=_TEXT, name=_TEXT, arguments=_TEXT),
]
_MODEL = _object(
    id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE, system_fingerprint=_TEXT
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "Usage": _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE),
    "Chat": _choices("chat.completion", (*_ENDS, "tool_calls"), message=_MESSAGE),
    "Completion": _choices("text_completion", _ENDS, text=_TEXT),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_WHOLE,
        model=_TEXT,
        system_fingerprint=_TEXT,
        seed=_WHOLE,
        status=_ITEM_ENDS,
        output=_list({"anyOf": _ITEMS}),
        usage=_object(input_tokens=_WHOLE, output_tokens=_WHOLE, total_tokens=_WHOLE),
    ),
    "Embeddings": _object(
        object={"const": "list"},
        data=_list(_object(object={"const": "embedding"}, index=_WHOLE, embedding={"anyOf": [_list(_NUMBER), _TEXT]})),
        model=_TEXT,
        usage=_object(prompt_tokens=_WHOLE, total_tokens=_WHOLE),
    ),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_list(_reference("Model"))),
    "Tokens": _object(count=_WHOLE, max_model_len=_WHOLE, tokens=_IDS),
    "Text": _object(prompt=_TEXT),
    "Status": _object(status=_TEXT),
}
# Why requests end without an answer.
ERRORS = {
    400: "A wrong field, broken JSON, or a prompt that is too long.",
    401: "The key is missing or wrong.",
    403: "The host is no name of this machine.",
    404: "There is no such model or path.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too many requests wait, or a limit of a minute is reached.",
    500: "The device failed.",
    503: "The server shuts down, or its engine is closed.",
    504: "The request took too long.",
}
