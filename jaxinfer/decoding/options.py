"""Checks of a strategy's options: one line that names the strategy, the option and its range."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.errors import InvalidOption


def check_range(strategy: Any, option: str, least: int | float, most: int | float) -> None:
    """Refuse a number outside ``least .. most``, and a broken one where the option's type is int."""
    value, is_whole = getattr(strategy, option), type(strategy).__dataclass_fields__[option].type is int
    known = int if is_whole else int | float
    if isinstance(value, bool) or not isinstance(value, known) or not least <= value <= most:
        kind = "a whole number" if is_whole else "a number"
        raise InvalidOption(f"{strategy.name}: {option}={value!r} is not {kind} from {least} to {most}")


def check_choice(strategy: Any, option: str, choices: Sequence[str | bool]) -> None:
    """Refuse a value that is none of the choices."""
    value = getattr(strategy, option)
    if value not in choices:
        raise InvalidOption(f"{strategy.name}: {option}={value!r} is none of {', '.join(map(spelling, choices))}")


def spelling(choice: str | bool) -> str:
    """Return how a choice is written on the command line."""
    return choice if isinstance(choice, str) else str(choice).lower()
