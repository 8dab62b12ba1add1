"""Conversations: what their messages may say, and their form for a chat template."""

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, objects, shown

# The newer name of a system message is known to few templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Check a conversation; return messages of ``role`` and ``content``, and of calls and their ids.

    The arguments of calls are objects, as templates want them, and results name their function.
    """
    called: dict[str, str] = {}
    return [_read_message(one, f"{name}[{index}]", called) for index, one in enumerate(objects(value, name))]


def _read_message(value: Mapping[str, Any], name: str, called: dict[str, str]) -> dict[str, Any]:
    """Return a message; ``called`` are the functions that were called before it, by the ids of the calls."""
    fields = Fields(value, f"{name}.")
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_field(f"{name}.role", f"{shown(role)} is not one of {', '.join(_ROLES)}")
    calls = _read_calls(fields, role, called)
    content = fields.raw("content") if calls else fields.required("content")
    message: dict[str, Any] = {
        "role": _ROLES[role],
        "content": read_content("" if content is None else content, f"{name}.content"),
    }
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        call_id = fields.required("tool_call_id")
        if not isinstance(call_id, str) or call_id not in called:
            raise wrong_field(f"{name}.tool_call_id", f"{shown(call_id)} is the id of no call before this message")
        message |= {"tool_call_id": call_id, "name": called[call_id]}
    fields.refuse("name", "models here do not tell speakers of one role apart")
    fields.refuse("function_call", "function calls are not implemented: use tool_calls", [])
    fields.refuse("refusal", "models here do not mark a refusal", "")
    fields.refuse("audio", "only text is read")
    fields.refuse("annotations", "answers here have none", [])
    fields.end()
    return message


def read_content(content: Any, name: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a content, which is a text or a list of parts of some kinds."""
    if isinstance(content, list):
        parts = enumerate(objects(content, name))
        return "".join(_read_part(part, f"{name}[{index}]", kinds) for index, part in parts)
    if not isinstance(content, str):
        raise wrong_field(name, f"{shown(content)} is not a text or a list of parts", "invalid_type")
    return content


def read_arguments(text: str, name: str) -> dict[str, Any]:
    """Return the arguments of a call, which must be JSON of an object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong_field(name, f"{shown(text)} is not JSON of an object")
    return arguments


def _read_part(value: Mapping[str, Any], name: str, kinds: tuple[str, ...]) -> str:
    fields = Fields(value, f"{name}.")
    kind = fields.required("type")
    if kind not in kinds:
        raise wrong_field(f"{name}.type", f"{shown(kind)} is not {' or '.join(kinds)}, which is all that is read")
    text = fields.required("text")
    if not isinstance(text, str):
        raise fields.wrong_type("text", text, "a string")
    fields.refuse("annotations", "answers here have none", [])
    fields.refuse("logprobs", "answers are read without log-probabilities", [])
    fields.end()
    return text


def _read_calls(fields: Fields, role: str, called: dict[str, str]) -> list[dict[str, Any]]:
    given = fields.raw("tool_calls")
    if given in (None, []):
        return []
    if role != "assistant":
        raise wrong_field(fields.name("tool_calls"), f"only an assistant calls, not the role {role}")
    name = fields.name("tool_calls")
    return [_read_call(one, f"{name}[{index}]", called) for index, one in enumerate(objects(given, name))]


def _read_call(value: Mapping[str, Any], name: str, called: dict[str, str]) -> dict[str, Any]:
    fields = Fields(value, f"{name}.")
    call_id, kind, function = (fields.required(field) for field in ("id", "type", "function"))
    if not isinstance(call_id, str) or not call_id:
        raise fields.wrong_type("id", call_id, "a string of one character at least")
    if kind != "function":
        raise wrong_field(f"{name}.type", f"{shown(kind)} is not function, which is all that can be called")
    if not isinstance(function, dict):
        raise fields.wrong_type("function", function, "an object")
    fields.raw("index")  # of a call that was put together from a stream
    fields.end()
    inner = Fields(function, f"{name}.function.")
    called[call_id] = inner.text("name")
    arguments = read_arguments(inner.text("arguments", "{}"), inner.name("arguments"))
    inner.end()
    return {"id": call_id, "type": "function", "function": {"name": called[call_id], "arguments": arguments}}
