"""Numbers between bounds, as regular expressions over their digits."""

from decimal import Decimal
from typing import NamedTuple

from jaxinfer.grammar.schema.pieces import either

# Larger bounds are refused: from here on, floating-point numbers skip whole ones.
LARGEST = 10**15
# Digits after the point, beyond those of a bound. With more, a number could round to a bound that it must not reach.
_MORE_DIGITS = 6
_INTEGER = "(?:-?(?:0|[1-9][0-9]*))"
# Longer exponents leave what readers of JSON can hold.
_NUMBER = rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"


class Bound(NamedTuple):
    """A number that is not passed; nor reached, if it ``is_open``."""

    value: Decimal
    is_open: bool = False


def integers(low: int | None, high: int | None) -> str | None:
    """Return whole numbers from ``low`` to ``high``; None bounds nothing, and is returned where there are none."""
    if low is None and high is None:
        return _INTEGER
    parts = []
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        negative = _naturals(max(1, -high if high is not None else 1), None if low is None else -low)
        parts.append(negative and f"-{negative}")
    return either(parts)


def numbers(low: Bound | None, high: Bound | None) -> str | None:
    """Return numbers between bounds; within any bounds they have no exponent."""
    if low is None and high is None:
        return f"(?:{_NUMBER})"
    zero = Bound(Decimal(0))
    parts = []
    if high is None or high.value >= 0:
        parts.append(_magnitudes(zero if low is None or low.value < 0 else low, high))
    if low is None or low.value < 0:
        least = zero if high is None or high.value > 0 else Bound(-high.value, high.is_open)
        negative = _magnitudes(least, None if low is None else Bound(-low.value, low.is_open))
        parts.append(negative and f"-{negative}")
    return either(parts)


def _naturals(least: int, most: int | None) -> str | None:
    """Return whole numbers from ``least``, which is not negative, to ``most``."""
    shortest = len(str(least))
    longest = shortest if most is None else len(str(most))
    parts = []
    for length in range(shortest, longest + 1):
        low = max(least, 10 ** (length - 1) if length > 1 else 0)
        high = 10**length - 1 if most is None else min(most, 10**length - 1)
        parts.append(_same_length(str(low), str(high)) if low <= high else None)
    if most is None:
        parts.append(f"[1-9][0-9]{{{longest},}}")
    return either(parts)


def _same_length(low: str, high: str) -> str:
    """Return the numbers from ``low`` to ``high``, which have as many digits."""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return either(parts) or ""


def _magnitudes(low: Bound, high: Bound | None) -> str | None:
    """Return numbers without a sign between bounds."""
    least, fraction = _split(low.value)
    lower = (fraction, low.is_open)
    if high is None:
        return either((_with_fraction(str(least), lower, None), _with_fraction(_naturals(least + 1, None), None, None)))
    most, fraction = _split(high.value)
    upper = (fraction, high.is_open)
    if least == most:
        return _with_fraction(str(least), lower, upper)
    if least > most:
        return None
    between = _naturals(least + 1, most - 1) if least + 1 < most else None
    return either(
        (
            _with_fraction(str(least), lower, None),
            _with_fraction(between, None, None),
            _with_fraction(str(most), None, upper),
        )
    )


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


# The digits of a bound that are left, and whether it is open; None once a number is clear of it.
_Rest = tuple[str, bool] | None


def _with_fraction(whole: str | None, low: _Rest, high: _Rest) -> str | None:
    """Return numbers of a whole part whose fraction is between bounds."""
    if whole is None:
        return None
    left = max(len(one[0]) for one in (low, high, ("", False)) if one is not None) + _MORE_DIGITS
    digits = either(_fractions(low, high, left))
    if digits is None:
        return whole if _may_end(low, high) else None
    return rf"(?:{whole}(?:\.{digits}){'?' if _may_end(low, high) else ''})"


def _may_end(low: _Rest, high: _Rest) -> bool:
    return low in (None, ("", False)) and (high is None or high[0] != "" or not high[1])


def _fractions(low: _Rest, high: _Rest, left: int) -> list[str]:
    """Return the ways to go on with one to ``left`` digits."""
    if left == 0:
        return []
    if low is None and high is None:
        return [f"[0-9]{{1,{left}}}"]
    ways: dict[tuple[_Rest, _Rest], list[str]] = {}
    for digit in "0123456789":
        low_digit = (low[0] or "0")[0] if low is not None else "0"
        high_digit = (high[0] or "0")[0] if high is not None else "9"
        if low_digit <= digit <= high_digit:
            after = (_after(low, digit == low_digit), _after(high, digit == high_digit))
            ways.setdefault(after, []).append(digit)
    found = []
    for (low_rest, high_rest), digits in ways.items():
        more, ends = either(_fractions(low_rest, high_rest, left - 1)), _may_end(low_rest, high_rest)
        if more is not None:
            found.append(f"[{''.join(digits)}](?:{more}){'?' if ends else ''}")
        elif ends:
            found.append(f"[{''.join(digits)}]")
    return found


def _after(bound: _Rest, is_on_it: bool) -> _Rest:
    return (bound[0][1:], bound[1]) if bound is not None and is_on_it else None
