"""A JSON schema as a regular expression, or an error that names what no regular expression here can say.

The texts are some of the schema's, not all: properties come in its order, none come that it does not name where it
names any, numbers within bounds have no exponent, and every value is written in one of few ways.
"""

from math import ceil, floor
from typing import Any

from jaxinfer.errors import InvalidOption, shown
from jaxinfer.grammar.schema.exclusion import exclude, same
from jaxinfer.grammar.schema.keywords import OF_TYPE, Schema, below, number, of_kind, type_of, types_of, whole, wrong
from jaxinfer.grammar.schema.merging import flat
from jaxinfer.grammar.schema.numbers import LARGEST, Bound, integers, numbers
from jaxinfer.grammar.schema.pieces import CHARACTER, SPACE, STRING, either, listed, literal, repeated
from jaxinfer.grammar.schema.strings import FORMATS, matching

# Arrays and objects of which a schema says nothing are nested so deeply; and so often a reference leads to itself.
_LEVELS = 3
# Beyond it compiling would take too long in any case.
_MOST_CHARACTERS = 1_000_000
_DEEPEST, _MOST_VALUES = 100, 10_000


def pattern_of(schema: Any) -> str:
    """Return the expression of a schema's texts; raise InvalidOption if it cannot be followed or has none."""
    try:
        found = _Translation(schema).value(schema, "")
    except RecursionError:
        raise wrong("", "it is nested too deeply") from None
    if found is None:
        raise wrong("", "no text follows it")
    return found


class _Translation:
    """Translates one schema; ``None`` is the pattern of what has no text."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # The references that are being followed.
        self._open: list[str] = []
        self._depth = self._values = 0

    def value(self, schema: Any, path: str) -> str | None:
        """Return the pattern of a value."""
        self._values += 1
        if self._depth > _DEEPEST or self._values > _MOST_VALUES:
            raise wrong(path, "it is too large")
        seen: list[str] = []
        whole_schema = flat(self._root, schema, path, seen)
        if any(self._open.count(name) >= _LEVELS for name in seen):
            return None
        self._open += seen
        self._depth += 1
        found = self._choices(whole_schema, path)
        self._depth -= 1
        del self._open[len(self._open) - len(seen) :]
        if found is not None and len(found) > _MOST_CHARACTERS:
            raise wrong(path, "it is too large")
        return found

    def _choices(self, schema: Schema, path: str) -> str | None:
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                rest = {key: value for key, value in schema.items() if key != keyword}
                return self._alternatives(schema[keyword], rest, keyword, path)
        if "enum" in schema or "const" in schema:
            return _values(schema, path)
        kinds = types_of(schema, path)
        return either([self._of_type(kind, schema, path) for kind in kinds]) if kinds else _anything(_LEVELS)

    def _alternatives(self, given: Any, rest: Schema, keyword: str, path: str) -> str | None:
        place = below(path, keyword)
        if not isinstance(given, list) or not given:
            raise wrong(place, f"{shown(given)} is not a list of one schema or more")
        if keyword == "oneOf":
            flats = [flat(self._root, one, place, []) for one in given]
            for index, one in enumerate(flats):
                if not all(exclude(one, other, place) for other in flats[index + 1 :]):
                    raise wrong(
                        place, "one value may follow two of these: say anyOf, or tell them apart by a type or const"
                    )
        found = []
        for index, one in enumerate(given):
            found.append(self.value({"allOf": [rest, one]} if rest else one, f"{place}[{index}]"))
        return either(found)

    def _of_type(self, kind: str, schema: Schema, path: str) -> str | None:
        if kind == "null":
            return "null"
        if kind == "boolean":
            return "(?:true|false)"
        if kind in ("integer", "number"):
            return _number(kind, schema, path)
        if kind == "string":
            return _string(schema, path)
        return self._array(schema, path) if kind == "array" else self._object(schema, path)

    def _array(self, schema: Schema, path: str) -> str | None:
        least, most = whole(schema, "minItems", path, 0) or 0, whole(schema, "maxItems", path)
        if schema.get("uniqueItems") not in (None, False) and (most is None or most > 1):
            raise wrong(below(path, "uniqueItems"), "this keyword is implemented for a single item alone")
        first = []
        for index, one in enumerate(of_kind(schema, "prefixItems", list, "a list", path)[:most]):
            found = self.value(one, below(path, f"prefixItems[{index}]"))
            if found is None:
                most = index
                break
            first.append(found)
        item = self._items(schema, path) if most is None or most > len(first) else None
        if item is None:
            most = len(first)
        if most is not None and least > most:
            return None
        return _bracketed(first, item, max(least - len(first), 0), None if most is None else most - len(first))

    def _items(self, schema: Schema, path: str) -> str | None:
        given = schema.get("items", True)
        if isinstance(given, list):
            raise wrong(below(path, "items"), "is a list, as in old drafts: say prefixItems")
        return _anything(_LEVELS - 1) if given is True else self.value(given, below(path, "items"))

    def _object(self, schema: Schema, path: str) -> str | None:
        named = of_kind(schema, "properties", dict, "an object", path)
        required = of_kind(schema, "required", list, "a list", path)
        least, most = whole(schema, "minProperties", path, 0) or 0, whole(schema, "maxProperties", path)
        if not all(isinstance(name, str) for name in required):
            raise wrong(below(path, "required"), f"{shown(required)} is not a list of names")
        more = schema.get("additionalProperties", True)
        if not named and not required and "properties" not in schema:
            return self._map(more, least, most, path)
        found = []
        for name in dict.fromkeys([*named, *required]):
            value = named.get(name, more)
            place = below(path, "properties", name) if name in named else below(path, "additionalProperties")
            pattern = _anything(_LEVELS - 1) if value is True else self.value(value, place)
            if pattern is not None:
                found.append((f"{literal(name)}:{SPACE}{pattern}", name in required))
            elif name in required:
                return None
        _check_count(least, most, found, path)
        inside = _members(found)
        return f"\\{{{SPACE}{inside}{SPACE}\\}}" if inside else f"\\{{{SPACE}\\}}"

    def _map(self, values: Any, least: int, most: int | None, path: str) -> str | None:
        """Return the pattern of objects whose names are not known."""
        if least > 1:
            raise wrong(below(path, "minProperties"), "more than 1 is not implemented where no property is named")
        item = _anything(_LEVELS - 1) if values is True else self.value(values, below(path, "additionalProperties"))
        if item is None or most == 0:
            return None if least else f"\\{{{SPACE}\\}}"
        inside = listed(f"{STRING}:{SPACE}{item}", least, most)
        return f"\\{{{SPACE}{inside}{SPACE}\\}}"


def _values(schema: Schema, path: str) -> str | None:
    values = schema.get("enum")
    if values is not None and not isinstance(values, list):
        raise wrong(below(path, "enum"), f"{shown(values)} is not a list")
    if "const" in schema:
        const = schema["const"]
        values = [const] if values is None or any(same(const, one) for one in values) else []
    kinds = types_of(schema, path) if "type" in schema else ()
    kept = [one for one in values or () if not kinds or type_of(one) in kinds or (_is_whole(one) and "number" in kinds)]
    bounds = {keyword for one in kept for keyword in OF_TYPE.get("number" if _is_whole(one) else type_of(one), ())}
    if beside := sorted(bounds & schema.keys()):
        raise wrong(below(path, beside[0]), "is not implemented beside enum or const")
    return either(literal(one) for one in kept)


def _is_whole(value: Any) -> bool:
    return type_of(value) == "integer"


def _number(kind: str, schema: Schema, path: str) -> str | None:
    step = number(schema, "multipleOf", path, LARGEST)
    if step is not None and step != 1:
        raise wrong(below(path, "multipleOf"), "only whole numbers can be asked for: 1")
    low = _tighter(schema, path, "minimum", "exclusiveMinimum", 1)
    high = _tighter(schema, path, "maximum", "exclusiveMaximum", -1)
    if kind == "number" and step is None:
        return numbers(low, high)
    least = None if low is None else floor(low.value) + 1 if low.is_open else ceil(low.value)
    most = None if high is None else ceil(high.value) - 1 if high.is_open else floor(high.value)
    return integers(least, most)


def _tighter(schema: Schema, path: str, closed: str, is_open: str, sign: int) -> Bound | None:
    """Return the one of two bounds that bounds more; ``sign`` is 1 for those from below."""
    one, other = number(schema, closed, path, LARGEST), number(schema, is_open, path, LARGEST)
    if one is None or (other is not None and other * sign >= one * sign):
        return None if other is None else Bound(other, True)
    return Bound(one)


def _string(schema: Schema, path: str) -> str | None:
    least, most = whole(schema, "minLength", path, 0) or 0, whole(schema, "maxLength", path)
    given = [keyword for keyword in ("pattern", "format") if keyword in schema]
    if len(given) + (least > 0 or most is not None) > 1:
        raise wrong(
            below(path, given[0]), "one of pattern, format, and minLength with maxLength is implemented at a time"
        )
    if not given:
        return None if most is not None and most < least else f'"{repeated(CHARACTER, least, most)}"'
    value = schema[given[0]]
    place = below(path, given[0])
    if not isinstance(value, str):
        raise wrong(place, f"{shown(value)} is not a string")
    if given == ["format"]:
        if value not in FORMATS:
            raise wrong(place, f"{shown(value)} is not one of {', '.join(FORMATS)}")
        return f'"{FORMATS[value]}"'
    try:
        return matching(value)
    except InvalidOption as error:
        raise wrong(place, str(error)) from None


def _anything(levels: int) -> str:
    """Return the pattern of any value, in which arrays and objects are nested so deeply."""
    parts: list[str | None] = ["null", "(?:true|false)", numbers(None, None), STRING]
    if levels:
        item = _anything(levels - 1)
        parts += [_bracketed([], item, 0, None), f"\\{{{SPACE}{listed(f'{STRING}:{SPACE}{item}', 0, None)}{SPACE}\\}}"]
    return either(parts) or ""


def _bracketed(first: list[str], item: str | None, least: int, most: int | None) -> str:
    """Return the pattern of an array: its first items, and then so many others."""
    inside = f",{SPACE}".join(first)
    if item is not None and most != 0:
        if first:
            inside += repeated(f",{SPACE}{item}", least, most)
        else:
            inside = listed(item, least, most)
    return f"\\[{SPACE}{inside}{SPACE}\\]" if inside else f"\\[{SPACE}\\]"


def _check_count(least: int, most: int | None, members: list[tuple[str, bool]], path: str) -> None:
    needed = sum(is_needed for _, is_needed in members)
    for keyword, holds in (("minProperties", least <= needed), ("maxProperties", most is None or most >= len(members))):
        if not holds:
            raise wrong(below(path, keyword), "is not implemented where it decides which properties come")


def _members(members: list[tuple[str, bool]]) -> str:
    """Return the pattern of properties between commas; those that are not needed may be left out."""
    needed = next((index for index, (_, is_needed) in enumerate(members) if is_needed), None)
    comma = f",{SPACE}"
    if needed is None:
        some = _some([pattern for pattern, _ in members])
        return f"(?:{some})?" if some else ""
    before = "".join(f"(?:{pattern}{comma})?" for pattern, _ in members[:needed])
    after = "".join(
        f"{comma}{pattern}" if is_needed else f"(?:{comma}{pattern})?" for pattern, is_needed in members[needed + 1 :]
    )
    return f"{before}{members[needed][0]}{after}"


def _some(patterns: list[str]) -> str:
    """Return the pattern of one or more, in their order, between commas; by halves, which keeps it short."""
    if len(patterns) < 2:
        return "".join(patterns)
    middle = (len(patterns) + 1) // 2
    first, last = _some(patterns[:middle]), _some(patterns[middle:])
    return f"(?:{first}(?:,{SPACE}{last})?|{last})"
