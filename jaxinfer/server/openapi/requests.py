"""What bodies may hold, as JSON schemas: the readers of requests are asked, so that no field can be forgotten."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.server.api.chat import read_chat
from jaxinfer.server.api.completions import read_completion
from jaxinfer.server.api.embeddings import read_embeddings
from jaxinfer.server.api.fields import Probe
from jaxinfer.server.api.responses import read_response
from jaxinfer.server.api.sampling import Limits
from jaxinfer.server.api.tokens import answer_detokenize, answer_tokenize
from jaxinfer.server.api.tools import NAME, Calling
from jaxinfer.server.tools.formats import FORMATS
from jaxinfer.tokenizers import Tokenizer

_TEXT: dict[str, Any] = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}
_SCHEMA = {"type": "object", "description": "A JSON schema."}
_PART = {"enum": ["input_text", "output_text"]}
_FUNCTION, _FUNCTION_NAME = {"enum": ["function"]}, {"type": "string", "pattern": f"^{NAME}$"}

# Of fields that readers check by themselves, by their place.
LEAVES: dict[str, dict[str, Any]] = {
    "model": _TEXT,
    "prompt": _TEXTS,
    "input": _TEXTS,
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "messages.role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
    "messages.content.type": {"enum": ["text"]},
    "messages.content.text": _TEXT,
    # Of messages without calls; those of others are described by what is read of them.
    "messages.tool_calls": {"type": "array", "maxItems": 0},
    "messages.tool_calls.id": {"type": "string", "minLength": 1},
    "messages.tool_calls.type": _FUNCTION,
    "messages.tool_calls.index": {},
    "messages.tool_call_id": _TEXT,
    "tools.type": _FUNCTION,
    "tools.function.name": _FUNCTION_NAME,
    "tools.function.parameters": _SCHEMA,
    "tool_choice.type": _FUNCTION,
    "tool_choice.function.name": _FUNCTION_NAME,
    # Of `/v1/responses`, where functions stand in their tools themselves.
    "tools.name": _FUNCTION_NAME,
    "tools.parameters": _SCHEMA,
    "tool_choice.name": _FUNCTION_NAME,
    "input.type": {"enum": ["message", "function_call", "function_call_output"]},
    "input.id": {},
    "input.status": {},
    "input.role": {"enum": ["system", "developer", "user", "assistant"]},
    "input.content.type": _PART,
    "input.content.text": _TEXT,
    "input.call_id": _TEXT,
    "input.name": _TEXT,
    "input.output.type": _PART,
    "input.output.text": _TEXT,
    "text.format.type": {"enum": ["text", "json_object", "json_schema"]},
    "text.format.name": _TEXT,
    "text.format.schema": _SCHEMA,
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16},
        ]
    },
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": 300,
    },
    "strategy": {"enum": ["on", "off"]},
    "response_format.type": {"enum": ["text", "json_object", "json_schema"]},
    "response_format.json_schema.name": _TEXT,
    "response_format.json_schema.schema": _SCHEMA,
    "structured_outputs": {
        "type": "object",
        "properties": {
            "regex": {"type": ["string", "null"], "minLength": 1},
            "choice": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "minItems": 1},
            "json": {"anyOf": [_SCHEMA, _TEXT, {"type": "null"}]},
        },
        "additionalProperties": False,
    },
}
# What may stand in the place of objects that are read field by field; in that of other contents, a text.
_BESIDE: dict[str, dict[str, Any]] = {
    "tools": {"type": "array", "maxItems": 0},
    "tool_choice": {"enum": ["auto", "none", "required"]},
    "input": _TEXT,
    "input.output": _TEXT,
}
# What must be given only where another field asks for it.
_NEEDED_BY_SOME = {"response_format.json_schema", "text.format.name", "text.format.schema"}


def request_bodies(limits: Limits, tokenizer: Tokenizer, dimensions: int) -> dict[str, dict[str, Any]]:
    """Return the schema of each path's body, for a model of these limits."""
    bodies = {path: described(probe) for path, probe in probes(limits, tokenizer, dimensions).items()}
    for body in bodies.values():
        is_needed = "model" in body.get("required", ())
        body["properties"]["model"] = {"enum": [*limits.models, *([] if is_needed else [None])]}
    return bodies


def probes(limits: Limits, tokenizer: Tokenizer, dimensions: int) -> dict[str, Probe]:
    """Return what the readers of bodies have asked for, by path."""

    def encode_chat(messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return [0]

    def text(kind: str = "text") -> list[Probe]:
        return [Probe({"type": kind, "text": "x"})]

    def conversation() -> dict[str, Any]:
        call = Probe({"id": "1", "type": "function", "function": Probe({"name": "f"})})
        result = {"role": "tool", "content": text(), "tool_call_id": "1"}
        spoken = {"role": "user", "content": text()}, {"role": "assistant", "content": text(), "tool_calls": [call]}
        return {"messages": list(map(Probe, (*spoken, result)))}

    def tools() -> dict[str, Any]:
        function, named = Probe({"name": "f", "parameters": {}}), Probe({"name": "f"})
        return {
            "tools": [Probe({"type": "function", "function": function})],
            "tool_choice": Probe({"type": "function", "function": named}),
        }

    def items() -> dict[str, Any]:
        message = {"role": "user", "content": text("input_text")}
        call = {"type": "function_call", "call_id": "1", "name": "f"}
        output = {"type": "function_call_output", "call_id": "1", "output": text("input_text")}
        return {"input": list(map(Probe, (message, call, output)))}

    model, calling = {"model": limits.model}, Calling(FORMATS[0])
    asked = {**model, "max_tokens": 1}
    schema = Probe({"name": "x", "schema": {}})
    ways = {
        "stream": True,
        "stream_options": Probe({}),
        "response_format": Probe({"type": "json_schema", "json_schema": schema}),
    }
    chat, completion = Probe({**asked, **ways, **conversation()}), Probe({**asked, **ways, "prompt": [0]})
    calls = Probe({**asked, **conversation(), **tools()})
    form, flat = Probe({"type": "json_schema", "name": "x", "schema": {}}), Probe({"type": "function", "name": "f"})
    response = Probe({**model, **items(), "stream": True, "stream_options": Probe({}), "text": Probe({"format": form})})
    caller = Probe({**model, **items(), "tools": [flat], "tool_choice": Probe({"type": "function", "name": "f"})})
    embeddings, detokenize = Probe({**model, "input": [0]}), Probe({"tokens": []})
    tokenize, spoken = Probe({"prompt": "x"}), Probe({**conversation(), **tools()})
    read_chat(chat, limits, encode_chat)
    read_chat(calls, limits, encode_chat, calling)
    read_response(response, limits, encode_chat)
    read_response(caller, limits, encode_chat, calling)
    read_completion(completion, limits, tokenizer)
    read_embeddings(embeddings, limits, tokenizer, dimensions)
    answer_tokenize(tokenize, limits, tokenizer, encode_chat)
    answer_tokenize(spoken, limits, tokenizer, encode_chat, calling)
    answer_detokenize(detokenize, limits, tokenizer)
    return {
        "/v1/chat/completions": _either(chat, calls),
        "/v1/responses": _either(response, caller),
        "/v1/completions": completion,
        "/v1/embeddings": embeddings,
        "/tokenize": _either(tokenize, spoken),
        "/detokenize": detokenize,
    }


def _either(one: Probe, other: Probe) -> Probe:
    """Return what was asked for in one of two ways, which exclude each other."""
    made = Probe({**other, **one})
    made.taken, made.refused = {**other.taken, **one.taken}, {**other.refused, **one.refused}
    made.needed = one.needed & other.needed
    return made


def described(probe: Probe, path: str = "") -> dict[str, Any]:
    """Return the schema of an object."""
    properties = {name: _field(probe, name, f"{path}{name}") for name in probe.taken}
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    needed = sorted(name for name in probe.needed if f"{path}{name}" not in _NEEDED_BY_SOME)
    return {**made, "required": needed} if needed else made


def _field(probe: Probe, name: str, path: str) -> dict[str, Any]:
    schema = dict(probe.taken[name])
    if name in probe.refused:
        harmless = [one for index, one in enumerate(schema["enum"]) if one not in schema["enum"][:index]]
        return {"enum": [*harmless, None], "description": f"Not implemented: {probe.refused[name]}."}
    schema = schema or _nested(probe.get(name), path) or LEAVES[path]
    is_needed = name in probe.needed and path not in _NEEDED_BY_SOME
    return schema if is_needed or not schema else or_null(schema)


def _nested(value: Any, path: str) -> dict[str, Any] | None:
    """Return the schema of a field whose value is an object or a list of objects that was asked itself."""
    if isinstance(value, Probe):
        found = described(value, f"{path}.")
    elif isinstance(value, list) and value and isinstance(value[0], Probe):
        kinds = [described(one, f"{path}.") for one in value]
        found = {"type": "array", "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}, "minItems": 1}
    else:
        return None
    beside = _TEXT if path.endswith("content") else _BESIDE.get(path)
    return found if beside is None else {"anyOf": [beside, found]}


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that lets null through, too: it is as if the field were absent."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}
