"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.errors import InvalidOption


@dataclass(frozen=True)
class Scan:
    """What one more piece of text made certain, and how many of its characters follow a completed stop string."""

    text: str
    overshoot: int | None


class StopStrings:
    """Hold back text that could be the beginning of a stop string, and cut the text at the first one completed.

    Of several stop strings the one that ends first wins; of those that end together, the one that begins first.
    """

    def __init__(self, stop: Sequence[str]):
        if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
            raise InvalidOption(f"stop must be a list of non-empty strings, not {stop!r}")
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, text: str) -> Scan:
        """Take the next piece and return the text that no stop string can claim any more."""
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
        """Give up what is held: no more text will come."""
        held, self._held = self._held, ""
        return held


def _longest_opening(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that ends ``text``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
