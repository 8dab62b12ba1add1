"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import InvalidOption


@dataclass(frozen=True)
class Scan:
    """The text that became certain with a piece, and how many of its characters follow a completed stop string."""

    text: str
    overshoot: int | None


class StopStrings:
    """Holds back text that may begin a stop string, and ends the text at the first completed stop string.

    If several stop strings match, the one that ends first wins; of those that end together, the one that begins first.
    """

    def __init__(self, stop: Sequence[str]):
        if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
            raise InvalidOption(f"stop must be a list of non-empty strings, not {stop!r}")
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, text: str) -> Scan:
        """Take the next piece; return the text that can no longer be part of a stop string."""
        held = self._held + text
        found = [(at + len(one), at) for one in self._stop if (at := held.find(one)) >= 0]
        if found:
            end, start = min(found)
            self._held = ""
            return Scan(held[:start], len(held) - end)
        keep = max((_longest_opening(held, one) for one in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return Scan(held[: len(held) - keep], None)

    def flush(self) -> str:
        """Return the held text: no more text will come."""
        held, self._held = self._held, ""
        return held


def _longest_opening(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` at the end of ``text``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
