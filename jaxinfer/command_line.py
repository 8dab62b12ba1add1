"""Shared by the command line and the trainers' commands: a parser with one-line errors, and file errors."""

import argparse
from typing import Any, NoReturn

from jaxinfer.errors import InvalidOption


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, each one line that says where help is, and accepts no abbreviations.

    An abbreviation that works today could be ambiguous with a future option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise InvalidOption."""
        raise InvalidOption(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def describe(error: OSError) -> str:
    """Return a one-line message for a file that could not be read or written."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else f"{reason}, while reading or writing"
