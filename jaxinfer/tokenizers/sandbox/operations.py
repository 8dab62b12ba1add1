"""What filters, operators and methods of strings cost a template, known before they run."""

import re
from collections.abc import Callable, Mapping, Sized
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import SecurityError

from jaxinfer.tokenizers.sandbox.budget import MOST_BITS, Budget, weigh

# Of a field in which a number or a text is formatted, of a level of JSON, and of a number's decimals.
_WIDEST, _MOST_DECIMALS = 4096, 300
# For filters that take long for each character or node.
_SLOW = 20_000
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# What stands between a field's key and the letter of its kind.
_FIELD = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?")
_PARENTHESIS = re.compile(r"[()]")

Rule = Callable[..., Any]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _width(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _center(budget: Budget, value: Any, width: Any = 80) -> None:
    budget.write(_width(width))


def _indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    ahead = len(width) if isinstance(width, str) else _width(width)
    budget.write(max(ahead, 0) * (sum(map(_text(value).count, _LINE_ENDS)) + 2))


def _replace(budget: Budget, value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    value, old, new = str(value), str(old), str(new)
    times = value.count(old) if old else len(value) + 1
    budget.write(len(value) + times * len(new))


def _batch(budget: Budget, value: Any, linecount: Any, fill_with: Any = None) -> None:
    budget.step(_width(linecount))


def _json(budget: Budget, value: Any, *_: Any, indent: Any = None, separators: Any = None, **__: Any) -> None:
    options = (*_, indent, separators)
    ahead = max((len(one) if isinstance(one, str) else _width(one) for one in options), default=0)
    budget.small(ahead, _WIDEST)
    nodes, _characters = weigh(value)
    budget.write(sum(weigh(options)) * nodes if separators is not None else 0)
    budget.write(ahead * _depth(value) * nodes)


def _depth(value: Any) -> int:
    """Return how deep containers are nested in a value."""
    depth, level = 0, [value]
    while level:
        depth += 1
        parts: list[Any] = []
        for one in level:
            parts.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ())
        level = parts
    return depth


def _round(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    budget.small(abs(_width(precision)), _MOST_DECIMALS)


def _join(budget: Budget, value: Any, d: Any = "", *_: Any, **__: Any) -> Any:
    items = value if isinstance(value, Sized) else list(value)
    budget.write(len(str(d)) * len(items))
    return items


def _sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = value if isinstance(value, Sized) else list(value)
    budget.step(0 if isinstance(start, int | float) else len(items) ** 2)
    return items


def _group(budget: Budget, value: Any, attribute: Any, default: Any = None, *_: Any, **__: Any) -> Any:
    items = value if isinstance(value, Sized) else list(value)
    budget.write(0 if default is None else len(str(default)) * len(items))
    return items


def _sequence(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.step(len(value) if isinstance(value, str | bytes | range) else 0)


def _slow(budget: Budget, value: Any, *arguments: Any, **named: Any) -> None:
    budget.small(sum(weigh((value, arguments, named))), _SLOW)


def field(number: str) -> int:
    """Return the width or the precision that a field is formatted with."""
    width = int(number[:6] or 0)
    if width > _WIDEST:
        raise SecurityError("it asks for too wide a field")
    return width


def _end_of_key(text: str, start: int) -> int:
    """Return where a field's key ends, if it has one: parentheses are counted."""
    if not text.startswith("(", start):
        return start
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def percent(budget: Budget, text: str | bytes, given: Any) -> None:
    """Look at ``text % given``."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    count, widest, at = 0, 0, text.find("%")
    while at >= 0:
        budget.step()
        found = _FIELD.match(text, _end_of_key(text, at + 1))
        assert found is not None
        if "*" in found.groups():
            raise SecurityError("it asks for a field of any width")
        count += 1
        widest = max(widest, *(field(number or "") for number in found.groups()))
        at = text.find("%", found.end() + (found.end() < len(text)))  # after the letter of its kind, which may be %
    nodes, characters = weigh(given)
    # Fields of a mapping may name one value many times.
    budget.write(count * widest + (count if "%(" in text else 1) * (16 * nodes + 4 * characters))


def _format(budget: Budget, value: Any, *arguments: Any, **named: Any) -> None:
    percent(budget, str(value), named or arguments)


FILTERS: Mapping[str, Rule] = MappingProxyType(
    {
        "center": _center,
        "indent": _indent,
        "replace": _replace,
        "batch": _batch,
        "slice": _batch,
        "tojson": _json,
        "round": _round,
        "join": _join,
        "sum": _sum,
        "groupby": _group,
        "format": _format,
        **dict.fromkeys(("list", "sort", "unique", "random", "min", "max"), _sequence),
        **dict.fromkeys(("pprint", "striptags", "title", "wordwrap", "urlize", "xmlattr", "urlencode"), _slow),
    }
)


def _pad(budget: Budget, text: Any, width: Any, *_: Any) -> None:
    budget.write(_width(width))


def _expand(budget: Budget, text: Any, tabsize: Any = 8) -> None:
    budget.write(len(text) + text.count(b"\t" if isinstance(text, bytes) else "\t") * _width(tabsize))


def _replace_in(budget: Budget, text: Any, old: Any, new: Any, *_: Any) -> None:
    times = text.count(old) if old else len(text) + 1
    budget.write(len(text) + times * len(new))


def _split(budget: Budget, text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    budget.step(len(text) // 2 if sep is None and len(text) > _SLOW else text.count(sep) if sep else 0)


def _lines(budget: Budget, text: Any, *_: Any, **__: Any) -> None:
    budget.step(sum(map(_text(text).count, _LINE_ENDS)) if isinstance(text, str) else len(text))


def _translate(budget: Budget, text: Any, table: Any, *_: Any) -> None:
    budget.write(len(text) * (1 + weigh(table)[1]))


def _encode(budget: Budget, text: Any, encoding: Any = "utf-8", *_: Any, **__: Any) -> None:
    if str(encoding).lower() not in ("utf-8", "utf8", "ascii", "latin-1"):
        raise SecurityError(f"it asks for the encoding {encoding!s:.20}")


def _bytes(budget: Budget, number: Any, length: Any = 1, *_: Any, **__: Any) -> None:
    budget.write(_width(length))


METHODS: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
        "expandtabs": _expand,
        "replace": _replace_in,
        "split": _split,
        "rsplit": _split,
        "splitlines": _lines,
        "translate": _translate,
        "encode": _encode,
        "decode": _encode,
        "to_bytes": _bytes,
    }
)


def operator(budget: Budget, sign: str, left: Any, right: Any) -> None:
    """Look at a binary operator of arithmetic."""
    if sign == "%" and isinstance(left, str | bytes):
        percent(budget, left, right)
    elif sign == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | bytes) and isinstance(times, int):
                budget.write(len(many) * max(times, 0))
            elif isinstance(many, list | tuple) and isinstance(times, int):
                budget.step(len(many) * max(times, 0))
    elif sign == "**" and isinstance(left, int) and isinstance(right, int):
        budget.small(left.bit_length() * abs(right), MOST_BITS)
    elif sign == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.step((len(left) + len(right)) // 8)
