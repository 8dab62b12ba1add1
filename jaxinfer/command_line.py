"""What the command line and the trainers' commands share: a parser that complains in one line, and files' errors."""

import argparse
from typing import Any, NoReturn

from jaxinfer.errors import InvalidOption


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its complaints, in one line that says where help is, and knows no abbreviations.

    An abbreviation that works today would be ambiguous with an option of tomorrow.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise InvalidOption."""
        raise InvalidOption(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def describe(error: OSError) -> str:
    """Return one line on a file that could not be read or written."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else f"{reason}, while reading or writing"
