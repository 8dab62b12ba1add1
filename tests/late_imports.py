"""Packages that tests compare with, imported at their first use: every worker collects all files, few need them."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            # pytest asks everything in a file whether it is a fixture.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def late(name: str) -> Any:
    """Return what stands for a module; skip the file, or the test, that asks for it where it is not installed."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"could not import '{package}'", allow_module_level=True)
    return _Late(name)
