"""Regular expressions of JSON's smallest parts, and how they are put together; syntax of Rust's ``regex``.

Every function returns an expression that may be repeated, or stand beside others, as it is.
"""

import json
from collections.abc import Iterable
from typing import Any

# One space may come where people write one.
SPACE = "[ ]?"
# Characters that stand for themselves in a string, as the inside of a class; and one character of a string.
UNSAFE = r"\"\\\x00-\x1F\x7F-\x9F"
CHARACTER = rf'(?:[^{UNSAFE}]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
# What the syntax of regular expressions gives a meaning.
MEANT = frozenset(r"\.+*?()|[]{}^$#&-~/")


def either(patterns: Iterable[str | None]) -> str | None:
    """Return what matches where any does; None stands for one that matches nothing."""
    found = list(dict.fromkeys(pattern for pattern in patterns if pattern is not None))
    if not found:
        return None
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def escaped(text: str) -> str:
    """Return an expression of a text itself."""
    return "".join(f"\\{char}" if char in MEANT else char for char in text)


def literal(value: Any) -> str:
    """Return an expression of a JSON value, written in one way."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a pair of surrogates is written as its escape
        text = json.dumps(value)
    return f"(?:{escaped(text)})"


def repeated(pattern: str, least: int, most: int | None) -> str:
    """Return a pattern, so many times."""
    return f"(?:{pattern}){{{least},{'' if most is None else most}}}"


def listed(item: str, least: int, most: int | None) -> str:
    """Return items between commas, so many; ``most`` is 1 at least."""
    more = repeated(f",{SPACE}{item}", max(least - 1, 0), None if most is None else most - 1)
    return f"{item}{more}" if least else f"(?:{item}{more})?"
