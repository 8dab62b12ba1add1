"""Reads the fields of a request: each is checked and taken once, and what nobody takes is refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer import errors
from jaxinfer.server.api.errors import ApiError, wrong_field

_SHOWN = 60


class Probe(dict[str, Any]):
    """A request that only asks which fields a reader takes: ``taken`` is their JSON schemas by name, in order.

    A field whose value the reader checks by itself has an empty schema. ``needed`` are those that must be given;
    ``refused`` are the reasons why those are refused that are.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.taken: dict[str, dict[str, Any]] = {}
        self.needed: set[str] = set()
        self.refused: dict[str, str] = {}


class Fields:
    """The fields of a JSON object; null means that a field is not given."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values, self._path = values, path
        self._taken: set[str] = set()

    def name(self, field: str) -> str:
        """Return a field's name as errors spell it."""
        return f"{self._path}{field}"

    def raw(self, field: str) -> Any:
        """Take a field whose value the caller checks."""
        return self._take(field)

    def _take(self, field: str, **schema: Any) -> Any:
        self._taken.add(field)
        if isinstance(self._values, Probe):
            known = {key: value for key, value in schema.items() if value is not None}
            self._values.taken.setdefault(field, {}).update(known)
        return self._values.get(field)

    def required(self, field: str) -> Any:
        """Take a field that must be given."""
        value = self.raw(field)
        if isinstance(self._values, Probe):
            self._values.needed.add(field)
        if value is None:
            raise wrong_field(self.name(field), "this field is missing", "missing_required_parameter")
        return value

    def text(self, field: str, default: str = "", *, longest: int | None = None) -> str:
        """Take a string of at most ``longest`` characters."""
        value = self._take(field, type="string", maxLength=longest)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_type(field, value, "a string")
        if longest is not None and len(value) > longest:
            raise wrong_field(self.name(field), f"has {len(value)} characters, but at most {longest} are allowed")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """Take true or false."""
        value = self._take(field, type="boolean", default=default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(field, value, "true or false")
        return value

    def whole(self, field: str, default: int | None, least: int, most: int) -> int | None:
        """Take a whole number."""
        value = self._take(field, type="integer", minimum=least, maximum=most, default=default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(field, value, "a whole number")
        if not least <= value <= most:
            raise wrong_field(self.name(field), f"{shown(value)} is not a whole number from {least} to {most}")
        return value

    def number(self, field: str, default: float, least: float, most: float, *, is_open: bool = False) -> float:
        """Take a number; ``least`` itself is not allowed if ``is_open``."""
        lower = {"exclusiveMinimum" if is_open else "minimum": least}
        value = self._take(field, type="number", **lower, maximum=most, default=default)
        if value is None:
            return default
        return check_number(value, self.name(field), least, most, is_open=is_open)

    def refuse(self, field: str, reason: str, *harmless: Any) -> None:
        """Refuse a field that is not implemented, but for values that ask for nothing."""
        value = self._take(field, enum=list(harmless))
        if isinstance(self._values, Probe):
            self._values.refused[field] = reason
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise wrong_field(self.name(field), reason, "unsupported_parameter")

    def end(self) -> None:
        """Refuse the fields that nobody has taken."""
        for field in self._values:
            if field not in self._taken:
                raise wrong_field(self.name(shown(field)), "there is no such field", "unknown_parameter")

    def wrong_type(self, field: str, value: Any, wanted: str) -> ApiError:
        """Return the error for a value of the wrong type."""
        return wrong_field(self.name(field), f"{shown(value)} is not {wanted}", "invalid_type")


def check_number(value: Any, name: str, least: float, most: float, *, is_open: bool = False) -> float:
    """Return a JSON value that must be a number between two others."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_field(name, f"{shown(value)} is not a number", "invalid_type")
    if not least <= value <= most or (is_open and value == least):
        raise wrong_field(name, f"{shown(value)} is not {'above' if is_open else 'from'} {least:g} up to {most:g}")
    return float(value)


def is_ids(value: Any) -> bool:
    """Tell whether a JSON value is a list of whole numbers, of one at least."""
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a JSON value that must be a list of objects, of one at least."""
    if not isinstance(value, list) or not value:
        raise wrong_field(name, f"{shown(value)} is not a list of one object or more", "invalid_type")
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            raise wrong_field(f"{name}[{index}]", f"{shown(one)} is not an object", "invalid_type")
    return value


def shown(value: Any) -> str:
    """Return the beginning of a value on one line, for an error's message."""
    text = value if isinstance(value, str) else errors.shown(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
