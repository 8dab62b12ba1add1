"""Checks of a strategy's options: one line that names the strategy, the option and its range."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.errors import InvalidOption


def check_range(strategy: Any, option: str, least: int | float, most: int | float) -> None:
    """Refuse a number outside ``least .. most``."""
    value = getattr(strategy, option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidOption(f"{strategy.name}: {option}={value!r} is not a number from {least} to {most}")


def check_choice(strategy: Any, option: str, choices: Sequence[str]) -> None:
    """Refuse a word that is none of the choices."""
    value = getattr(strategy, option)
    if value not in choices:
        raise InvalidOption(f"{strategy.name}: {option}={value!r} is none of {', '.join(choices)}")
