"""Reads a ``config.json`` key by key and raises an error that names any unread key."""

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.keys.generic_keys import FAMILY_KEYS, GENERIC_KEYS, NEUTRAL_VALUES, NULLABLE_KEYS

T = TypeVar("T")
_LARGEST_INT = 2**31 - 1
# Models compute in float32, where a larger number is infinite.
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127


class ConfigReader:
    """Typed access to a config; remembers which keys were read.

    Every getter raises :class:`UnsupportedModel` that names the key; a getter without a default requires it.
    """

    def __init__(self, config: Mapping[str, Any], family: str, section: str = ""):
        self._config = config
        self._family = family
        self._section = section
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Tell whether the key is present and not null; this does not count as reading it."""
        return self._config.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Tell whether the key is present and null; this does not count as reading it."""
        return key in self._config and self._config[key] is None

    def positive_int(self, key: str, default: int | None = None, most: int = _LARGEST_INT) -> int:
        """Read an integer in ``1..most``."""
        value = self._value(key, default)
        if not _is_int(value) or not 1 <= value <= most:
            raise self.refuse(key, value, f"it must be an integer from 1 to {most}")
        return value

    def natural_int(self, key: str, default: int | None = None) -> int:
        """Read an integer of at least 0."""
        value = self._value(key, default)
        if not _is_token(value):
            raise self.refuse(key, value, f"it must be an integer from 0 to {_LARGEST_INT}")
        return value

    def optional_int(self, key: str, default: int | None = None) -> int | None:
        """Read an integer of at least 1, or None if it is null."""
        self._read.add(key)
        value = self._config.get(key, default)
        if value is not None and (not _is_int(value) or not 1 <= value <= _LARGEST_INT):
            raise self.refuse(key, value, f"it must be an integer from 1 to {_LARGEST_INT}, or null")
        return value

    def positive_float(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """Read a finite number above 0 and not below ``least``."""
        value = self._value(key, default)
        if not _is_number(value) or value <= 0 or value < least:
            raise self.refuse(
                key, value, f"it must be a number of at least {least:g}" if least else "it must be above 0"
            )
        return float(value)

    def positive_floats(self, key: str, count: int) -> tuple[float, ...]:
        """Read a list of ``count`` finite numbers above 0."""
        numbers = self.numbers(key, count)
        if 0 in numbers:
            raise self.refuse(key, self._config[key], "its numbers must be above 0")
        return numbers

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read a list of ``count`` finite numbers of at least 0."""
        value = self._value(key, None)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.refuse(key, value, f"it must be a list of {count} numbers")
        if not all(_is_number(number) and number >= 0 for number in value):
            raise self.refuse(key, value, "its numbers must be at least 0")
        return tuple(float(number) for number in value)

    def optional_float(self, key: str) -> float | None:
        """Read a finite number of at least 0, or None if it is absent or null."""
        self._read.add(key)
        value = self._config.get(key)
        if value is not None and (not _is_number(value) or value < 0):
            raise self.refuse(key, value, "it must be a number of at least 0, or null")
        return None if value is None else float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Read a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "it must be true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """Read one of the words in ``choices`` and return its value; ``default`` is one of those words."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(key, value, f"known values are {', '.join(choices)}")
        return choices[value]

    def choices(self, key: str, choices: Mapping[str, T], count: int) -> tuple[T, ...]:
        """Read a list of ``count`` of the words in ``choices`` and return their values."""
        value = self._value(key, None)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.refuse(key, value, f"it must be a list of {count} words")
        if not all(isinstance(word, str) and word in choices for word in value):
            raise self.refuse(key, value, f"known words are {', '.join(choices)}")
        return tuple(choices[word] for word in value)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Read a list of at least ``count`` zeros and ones; return the first ``count``."""
        value = self._value(key, None)
        is_list = isinstance(value, list | tuple) and len(value) >= count
        if not is_list or not all(_is_int(number) and number in (0, 1) for number in value):
            raise self.refuse(key, value, f"it must be a list of {count} zeros and ones")
        return tuple(bool(number) for number in value[:count])

    def places(self, key: str, count: int) -> tuple[int, ...]:
        """Read a list of whole numbers below ``count``; an absent or null one is empty."""
        self._read.add(key)
        value = self._config.get(key) or []
        if not isinstance(value, list | tuple) or not all(_is_int(place) and 0 <= place < count for place in value):
            raise self.refuse(key, value, f"it must be a list of numbers from 0 to {count - 1}")
        return tuple(value)

    def optional_token(self, key: str, default: int | None = None) -> int | None:
        """Read one token id; null means that the model has none."""
        self._read.add(key)
        value = self._config.get(key, default)
        if value is not None and not _is_token(value):
            raise self.refuse(key, value, "it must be a token id or null")
        return value

    def tokens(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Read one token id or a list of them; null means none."""
        self._read.add(key)
        value = self._config.get(key, default)
        listed = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if not all(_is_token(token) for token in listed):
            raise self.refuse(key, value, "it must be a token id, a list of token ids, or null")
        return tuple(listed)

    def section(self, key: str) -> "ConfigReader | None":
        """Read an object with its own keys; None if it is absent, null or empty."""
        self._read.add(key)
        value = self._config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(key, value, "it must be an object or null")
        return ConfigReader(value, self._family, f"{key}.") if value else None

    def refuse(self, key: str, value: Any, why: str) -> UnsupportedModel:
        """Return the error, for the caller to raise, that names a key, its value and the reason."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        name = " ".join(f"{self._section}{key}".split())
        return UnsupportedModel(f"config.json ({self._family}): {name} = {shown} is not supported: {why}")

    def finish(self, result: T) -> T:
        """Return ``result`` if every key of the config was read or is known to change nothing."""
        silent: frozenset[str] = (
            frozenset() if self._section else GENERIC_KEYS | FAMILY_KEYS.get(self._family, frozenset())
        )
        for key in self._config.keys() - self._read - silent:
            value = self._config[key]
            if key not in NEUTRAL_VALUES:
                why = f"no key of that name is known for {self._family}; delete it if it changes nothing"
                raise self.refuse(key, value, why)
            if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[key]):
                raise self.refuse(key, value, "the decoder does not implement it")
        return result

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        if value is None and (key not in self._config or key in NULLABLE_KEYS):
            value = default
            if default is None:
                raise UnsupportedModel(f"config.json ({self._family}): {self._section}{key} is missing")
        return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) and abs(value) <= 2**53) or (isinstance(value, float) and abs(value) <= _LARGEST_FLOAT)


def _is_token(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _LARGEST_INT
