"""Reads a ``quantization_config`` key by key; a key that nobody reads is an error."""

from typing import Any

from jaxinfer.models.families.keys.config_reader import ConfigReader

# Of inputs or outputs.
_MOST = 1 << 20


class QuantizationKeys(ConfigReader):
    """Typed access to a ``quantization_config``; every getter raises UnsupportedModel that names the key."""

    def one_of(self, key: str, values: tuple[Any, ...], default: Any = None) -> Any:
        """Read one of these values; null is the default."""
        value = self._optional(key)
        value = default if value is None else value
        if not any(type(value) is type(each) and value == each for each in values):
            raise self.refuse(key, value, f"known values are {', '.join(map(str, values))}")
        return value

    def group_size(self, key: str) -> int | None:
        """Read a number of inputs that share a scale, None for -1: all of a row."""
        value = self._optional(key)
        if type(value) is not int or not (value == -1 or _is_size(value)):
            raise self.refuse(key, value, "it must be a number of inputs, or -1 for all")
        return None if value == -1 else value

    def sizes(self, key: str) -> tuple[int, int]:
        """Read a list of two integers of at least 1."""
        value = self._optional(key)
        if not (isinstance(value, list) and len(value) == 2 and all(_is_size(each) for each in value)):
            raise self.refuse(key, value, "it must be a list of two integers of at least 1")
        return value[0], value[1]

    def section(self, key: str) -> "QuantizationKeys | None":
        """Read an object with its own keys; None if it is absent, null or empty."""
        found = super().section(key)
        return None if found is None else QuantizationKeys(found._config, self._family, f"{self._section}{key}.")

    def names(self) -> tuple[str, ...]:
        """Return all keys."""
        return tuple(self._config)

    def words(self, key: str) -> tuple[str, ...]:
        """Read a list of names; null is none."""
        value = self._optional(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise self.refuse(key, value, "it must be a list of names, or null")
        return tuple(value or ())

    def text(self, key: str) -> str:
        """Read a text."""
        value = self._optional(key)
        if not isinstance(value, str):
            raise self.refuse(key, value, "it must be a text")
        return value

    def without_effect(self, keys: str) -> None:
        """Accept keys that say how a checkpoint was made, or how other programs run it."""
        self._read.update(keys.split())

    def empty(self, *keys: str) -> None:
        """Accept keys that must be absent, null, false or empty: what they ask for is not known."""
        for key in keys:
            value = self._optional(key)
            if value is not None and value is not False and value not in ({}, []):
                raise self.refuse(key, value, "only models without it are known")

    def _optional(self, key: str) -> Any:
        self._read.add(key)
        return self._config.get(key)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST
