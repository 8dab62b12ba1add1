"""The ``input`` of ``/v1/responses``: a text, or messages, calls and their results, as a conversation."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, objects, shown
from jaxinfer.server.api.messages import read_arguments, read_content

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text")


def read_input(value: Any, instructions: str) -> list[dict[str, Any]]:
    """Check an input; return the messages of its conversation, ``instructions`` first if there are any."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    called: dict[str, str] = {}
    for index, item in enumerate(objects(value, "input")):
        _add_item(item, f"input[{index}]", messages, called)
    return messages


def _add_item(value: Mapping[str, Any], name: str, messages: list[dict[str, Any]], called: dict[str, str]) -> None:
    fields = Fields(value, f"{name}.")
    kind = fields.raw("type") or "message"
    # Of an item that an answer had: both may be sent back.
    fields.raw("id")
    fields.raw("status")
    if kind == "message":
        messages.append(_read_message(fields))
    elif kind == "function_call":
        _add_call(fields, messages, called)
    elif kind == "function_call_output":
        call_id = fields.required("call_id")
        if not isinstance(call_id, str) or call_id not in called:
            raise wrong_field(fields.name("call_id"), f"{shown(call_id)} is the id of no call before this item")
        content = read_content(fields.required("output"), fields.name("output"), _PARTS)
        messages.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": called[call_id]})
    else:
        known = "message, function_call and function_call_output"
        raise wrong_field(fields.name("type"), f"{shown(kind)} is none of {known}, which are read")
    fields.end()


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_field(fields.name("role"), f"{shown(role)} is not one of {', '.join(_ROLES)}")
    content = read_content(fields.required("content"), fields.name("content"), _PARTS)
    return {"role": _ROLES[role], "content": content}


def _add_call(fields: Fields, messages: list[dict[str, Any]], called: dict[str, str]) -> None:
    """Add a call to what the assistant said before it, or as a message of its own."""
    call_id, name = fields.required("call_id"), fields.required("name")
    for field, value in (("call_id", call_id), ("name", name)):
        if not isinstance(value, str):
            raise fields.wrong_type(field, value, "a string")
    called[call_id] = name
    arguments = read_arguments(fields.text("arguments", "{}"), fields.name("arguments"))
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)
