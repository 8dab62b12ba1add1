"""The fields that say which texts may come: ``response_format``, and ``structured_outputs`` for what it cannot say."""

from collections.abc import Callable
from typing import Any

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.grammar import Grammar
from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, shown

_FORMAT, _OWN = "response_format", "structured_outputs"
# What a client may ask for by `_OWN`.
_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "json": Grammar.json_schema,
}


def take_grammar(fields: Fields) -> tuple[str, Grammar | None]:
    """Take the grammar of an answer: of a schema or any JSON object, of a regular expression, or some texts.

    Return the name of the field that has it, too.
    """
    asked, own = fields.raw(_FORMAT), fields.raw(_OWN)
    found = None if asked is None else read_format(asked, _FORMAT)
    if own is None:
        return _FORMAT, found
    if found is not None:
        raise wrong_field(_OWN, f"is given beside {_FORMAT}: give one")
    if not isinstance(own, dict):
        raise fields.wrong_type(_OWN, own, "an object")
    kinds = [kind for kind, value in own.items() if value is not None]
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        raise wrong_field(_OWN, f"needs one of {', '.join(_KINDS)}: {shown(own)}")
    return _OWN, _made(f"{_OWN}.{kinds[0]}", _KINDS[kinds[0]], own[kinds[0]])


def read_format(asked: Any, name: str, *, is_flat: bool = False) -> Grammar | None:
    """Return the grammar of a format; ``is_flat``: a schema stands beside the format's type."""
    if not isinstance(asked, dict):
        raise wrong_field(name, f"{shown(asked)} is not an object", "invalid_type")
    inner = Fields(asked, f"{name}.")
    kind = inner.required("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong_field(f"{name}.type", f"{shown(kind)} is none of text, json_object, json_schema")
    if kind != "json_schema":
        inner.end()
        return None if kind == "text" else Grammar.json_object()
    parts = inner
    if not is_flat:
        given = inner.required("json_schema")
        inner.end()
        if not isinstance(given, dict):
            raise inner.wrong_type("json_schema", given, "an object")
        parts = Fields(given, f"{name}.json_schema.")
    if not isinstance(title := parts.required("name"), str):
        raise parts.wrong_type("name", title, "a string")
    parts.text("description")
    parts.flag("strict")  # answers always follow the schema
    schema = parts.required("schema")
    parts.end()
    return _made(parts.name("schema"), Grammar.json_schema, schema)


def _made(param: str, make: Callable[[Any], Grammar], value: Any) -> Grammar:
    try:
        return make(value)
    except InvalidOption as error:
        raise wrong_field(param, str(error)) from error
