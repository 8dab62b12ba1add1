"""Reads a report that ``jaxinfer bench acceptance --json`` wrote."""

import dataclasses
import json
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from jaxinfer.bench.acceptance.measure import AcceptanceReport
from jaxinfer.errors import InvalidOption


def read_report(path: Path) -> AcceptanceReport:
    """Return the report that a JSON file holds."""
    content = path.read_bytes()
    try:
        return parse(AcceptanceReport, json.loads(content))
    except (ValueError, RecursionError):
        raise InvalidOption(
            f"{path}: not a report of this version's `jaxinfer bench acceptance --json`; name a file with its output"
        ) from None


def parse(kind: Any, value: Any) -> Any:
    """Return a JSON value as the type that an annotation names; raises ValueError where it is of another."""
    origin, parts = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError
        return kind(**{name: parse(hint, value[name]) for name, hint in hints.items()})  # pyright: ignore
    if origin is tuple and isinstance(value, list):
        return tuple(parse(parts[0], one) for one in value)
    if origin is dict and isinstance(value, dict):
        return {parts[0](key): parse(parts[1], one) for key, one in value.items()}
    if origin is UnionType:
        return None if value is None else parse(parts[0], value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError
    return value
