"""Spells values out, so that two of one spelling are alike in everything that a compiled program can depend on."""

import dataclasses
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.kept.folder import NotKept

_PACKAGE = "jaxinfer"


def digest(*texts: str) -> str:
    """Return letters that stand for texts."""
    found = hashlib.sha256()
    for text in texts:
        # With its length, lest two lists of texts be one when joined.
        found.update(f"{len(text)}:{text}".encode())
    return found.hexdigest()[:40]


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return letters that stand for the names and bytes of files; raises OSError for one that cannot be read."""
    texts = []
    for path in paths:
        with path.open("rb") as file:
            texts.append(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}")
    return digest(*texts)


def spell(value: Any, arguments: frozenset[int] = frozenset()) -> str:
    """Spell a value out whole, every field of a dataclass included, whether it is compared or shown or not.

    Arrays that are among a program's ``arguments`` (their ids) are spelled by type; any other by its numbers too, for
    it would be a constant of the program. Raises NotKept for what is not known to be spelled by its parts: an object of
    code other than this package's may do anything.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kind = f"array {value.dtype}{list(value.shape)}"
        if id(value) in arguments:
            return kind
        # Read where it lies: it may be a large part of the memory.
        flat = np.ascontiguousarray(np.asarray(value)).reshape(-1)
        return f"{kind} {hashlib.sha256(flat.view(np.uint8).data).hexdigest()}"
    if isinstance(value, np.dtype):
        return f"dtype {value.name}"
    if isinstance(value, functools.partial):
        return f"partial {_function(value.func)} {spell(value.args, arguments)} {spell(value.keywords, arguments)}"
    if isinstance(value, types.FunctionType):
        return f"function {_function(value)}"
    if isinstance(value, Mapping):
        items = sorted((spell(key), spell(each, arguments)) for key, each in value.items())
        return f"mapping {{{', '.join(f'{key}: {each}' for key, each in items)}}}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__} ({', '.join(spell(each, arguments) for each in value)})"
    kind = type(value)
    if dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = list(zip(kind._fields, value, strict=True))
    else:
        raise NotKept(f"{kind.__qualname__} has no spelling")
    _require_known(kind.__module__, kind.__qualname__)
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(f'{k}={spell(v, arguments)}' for k, v in fields)})"


def _function(function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    # One that was made inside another may hold anything, and one that was put in another's place is not in the source.
    if not module or getattr(sys.modules.get(module), name, None) is not function:
        raise NotKept("a function that is not a module's own has no spelling")
    _require_known(module, name)
    return f"{module}.{name}"


def _require_known(module: str, name: str) -> None:
    if module.partition(".")[0] != _PACKAGE:
        raise NotKept(f"{module}.{name} is not code of {_PACKAGE}, whose changes would be seen")
