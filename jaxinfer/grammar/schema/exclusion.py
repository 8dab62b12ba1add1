"""Whether no value follows two schemas at once, which ``oneOf`` needs."""

from typing import Any

from jaxinfer.grammar.schema.keywords import Schema, type_of, types_of


def exclude(one: Schema, other: Schema, path: str) -> bool:
    """Tell whether it is certain: by types, by values, or by a property that both need and that tells them apart."""
    first, second = _values(one), _values(other)
    if first is not None and second is not None:
        return not any(same(left, right) for left in first for right in second)
    kinds, others = _kinds(one, path), _kinds(other, path)
    if not kinds & others:
        return True
    if kinds & others != {"object"}:
        return False
    needed = set(one.get("required") or ()) & set(other.get("required") or ())
    return any(_tells_apart(one, other, name) for name in needed)


def same(one: Any, other: Any) -> bool:
    """Tell whether two JSON values are equal: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Schema, path: str) -> set[str]:
    """Return the types that a value may have; a whole number is a number, too."""
    values = _values(schema)
    if values is not None:
        kinds = {type_of(value) for value in values}
    elif schema.get("type") is None:
        return {"null", "boolean", "integer", "number", "string", "array", "object"}
    else:
        kinds = set(types_of(schema, path))
    return kinds | {"integer"} if "number" in kinds else kinds


def _tells_apart(one: Schema, other: Schema, name: str) -> bool:
    first, second = (_values((schema.get("properties") or {}).get(name)) for schema in (one, other))
    return first is not None and second is not None and not any(same(left, right) for left in first for right in second)
