"""Schemas that hold together: references, and ``allOf``."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from jaxinfer.errors import shown
from jaxinfer.grammar.schema.keywords import Schema, below, followed, types_of, wrong

# A chain of references that is longer leads back to itself.
_LONGEST_CHAIN = 64
_LEAST = frozenset({"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"})
_MOST = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"})


def flat(root: Any, schema: Any, path: str, seen: list[str]) -> Schema:
    """Return a schema with its references and ``allOf`` merged into it; ``seen`` gets the references."""
    given = followed(schema, path)
    parts: list[tuple[str, Any]] = []
    if "$ref" in given:
        name = given["$ref"]
        seen.append(str(name))
        if len(seen) > _LONGEST_CHAIN:
            raise wrong(below(path, "$ref"), f"{shown(name)} leads back to itself")
        parts.append(("", _found(root, name, below(path, "$ref"))))
    several = given.get("allOf", [])
    if not isinstance(several, list):
        raise wrong(below(path, "allOf"), f"{shown(several)} is not a list")
    parts += [(f"allOf[{index}]", one) for index, one in enumerate(several)]
    made: Schema = {key: value for key, value in given.items() if key not in ("$ref", "allOf")}
    for name, part in parts:
        made = merged(made, flat(root, part, below(path, name), seen), path)
    return made


def _found(root: Any, name: Any, path: str) -> Any:
    """Return what a reference within the schema names."""
    if not isinstance(name, str) or (name != "#" and not name.startswith("#/")):
        raise wrong(path, f"{shown(name)} does not begin with #/: other documents are not read")
    place = root
    for part in unquote(name).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        else:
            raise wrong(path, f"{shown(name)} is not in the schema")
    return place


def merged(one: Schema, other: Schema, path: str) -> Schema:
    """Return a schema of what follows both."""
    if not one or not other:
        return one or other
    for first, second in ((one, other), (other, one)):
        others = set(second.get("properties") or ()) - set(first.get("properties") or ())
        if first.get("additionalProperties", True) is not True and others:
            reason = f"additionalProperties forbids what is beside it: {shown(min(others))}"
            raise wrong(path, reason)
    made = dict(one)
    for keyword, value in other.items():
        made[keyword] = _both(keyword, one[keyword], value, path) if keyword in one else value
    return made


def _both(keyword: str, one: Any, other: Any, path: str) -> Any:
    if one == other and type(one) is type(other):
        return one
    if keyword == "type":
        return _shared_types(one, other, path)
    try:
        if keyword in _LEAST:
            return max(one, other)
        if keyword in _MOST:
            return min(one, other)
        if keyword == "required":
            return list(dict.fromkeys([*one, *other]))
        if keyword == "properties":
            return {
                **one,
                **{key: {"allOf": [one[key], value]} if key in one else value for key, value in other.items()},
            }
    except TypeError:
        raise wrong(below(path, keyword), "is no value of this keyword") from None
    if keyword in ("items", "additionalProperties"):
        return {"allOf": [one, other]}
    raise wrong(below(path, keyword), "stands twice, in parts that hold together, which is not implemented")


def _shared_types(one: Any, other: Any, path: str) -> list[str]:
    first, second = types_of({"type": one}, path), types_of({"type": other}, path)
    shared = [kind for kind in first if kind in second or (kind == "integer" and "number" in second)]
    shared += [kind for kind in second if kind == "integer" and "number" in first and kind not in shared]
    if not shared:
        raise wrong(below(path, "type"), "no value has all types")
    return shared
