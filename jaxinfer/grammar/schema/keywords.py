"""The keywords of JSON Schema, and their values: which are followed, and which are refused."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxinfer.errors import InvalidOption, one_line, shown

Schema = Mapping[str, Any]

# They bound the values of one type and say nothing of others.
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FOLLOWED = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "const",
    "enum",
    "type",
    *(one for each in OF_TYPE.values() for one in each),
}
# What JSON Schema defines besides. All other keywords mean nothing to it.
_REFUSED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "additionalItems", "unevaluatedItems",
    "patternProperties", "propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas",
    "dependencies", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor",
}  # fmt: skip


def wrong(path: str, reason: str) -> InvalidOption:
    """Return the error for a place in a schema."""
    return InvalidOption(one_line(f"the JSON schema cannot be followed: {path + ': ' if path else ''}{reason}"))


def below(path: str, *names: object) -> str:
    """Return the place below another."""
    return ".".join(filter(None, (path, *map(str, names))))


def followed(schema: Any, path: str) -> Schema:
    """Return what a schema asks for, without what describes it; raise InvalidOption for what is not implemented."""
    if schema is True:
        return {}
    if schema is False:
        return {"enum": []}
    if not isinstance(schema, Mapping):
        raise wrong(path, f"{shown(schema)} is not a schema")
    for keyword in schema:
        if keyword in _REFUSED:
            raise wrong(below(path, keyword), "this keyword is not implemented")
    return {keyword: value for keyword, value in schema.items() if keyword in _FOLLOWED}


def types_of(schema: Schema, path: str) -> tuple[str, ...]:
    """Return the types that a schema names; without any, those that its keywords are about, for it may choose."""
    named = schema.get("type")
    if named is None:
        return tuple(kind for kind, keywords in OF_TYPE.items() if any(one in schema for one in keywords))
    names = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, list) else ()
    if not names or not all(name in TYPES for name in names):
        raise wrong(below(path, "type"), f"{shown(named)} is not one of {', '.join(TYPES)}")
    return names


def type_of(value: Any) -> str:
    """Return the narrowest type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def whole(schema: Schema, keyword: str, path: str, default: int | None = None) -> int | None:
    """Return a keyword that is a number of things."""
    value = schema.get(keyword, default)
    if value is default:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or value != value // 1 or value > 10**6:
        raise wrong(below(path, keyword), f"{shown(value)} is not a whole number up to a million")
    return int(value)


def number(schema: Schema, keyword: str, path: str, largest: int) -> Decimal | None:
    """Return a keyword that is a number, exactly."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(below(path, keyword), f"{shown(value)} is not a number")
    if not abs(value) <= largest:
        raise wrong(below(path, keyword), f"bounds beyond {largest} are not implemented")
    return Decimal(str(value))


def of_kind(schema: Schema, keyword: str, kind: type, what: str, path: str) -> Any:
    """Return a keyword's value of a Python type, an empty one if it is not there."""
    value = schema.get(keyword)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise wrong(below(path, keyword), f"{shown(value)} is not {what}")
    return value
