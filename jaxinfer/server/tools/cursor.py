"""Reads a text that comes in pieces, a character at a time, by functions that wait for the next one.

Readers are generators: ``yield`` asks for a character and gets it, or `END` once the text is over. What a reader finds
can then not depend on how the text was cut.
"""

from collections.abc import Generator
from typing import TypeVar

from jaxinfer.server.tools.deltas import Deltas

END = ""

Result = TypeVar("Result")
Reading = Generator[None, str, Result]


class Cursor:
    """The place in the text; ``held`` is what has been read and may yet become content."""

    def __init__(self) -> None:
        self._next: str | None = None
        self.held = ""

    def peek(self) -> Reading[str]:
        """Return the next character and leave it there."""
        if self._next is None:
            self._next = yield
        return self._next

    def take(self) -> Reading[str]:
        """Return the next character and hold it. The end can be taken again and again."""
        char = yield from self.peek()
        if char != END:
            self._next = None
        self.held += char
        return char

    def take_text(self, text: str) -> Reading[bool]:
        """Take characters as long as they are those of a text; tell whether all of it came."""
        for wanted in text:
            if (yield from self.peek()) != wanted:
                return False
            yield from self.take()
        return True

    def take_space(self) -> Reading[None]:
        """Take white space, as JSON has it."""
        while (char := (yield from self.peek())) != END and char in " \t\n\r":
            yield from self.take()

    def drop(self) -> None:
        """Forget what is held: it has become a call."""
        self.held = ""


def seek(cursor: Cursor, deltas: Deltas, mark: str) -> Reading[bool]:
    """Read up to the end of a mark, which is then held; tell whether it came before the end.

    What is no mark becomes content. What is held already does too, but its last characters may begin the mark.
    """
    cut = max(len(cursor.held) - len(mark) + 1, 0)
    deltas.content(cursor.held[:cut])
    rest, candidate = cursor.held[cut:], ""
    cursor.drop()
    while candidate != mark:
        if rest:
            char, rest = rest[0], rest[1:]
        else:
            char = yield from cursor.take()
        if char == END:
            deltas.content(candidate)
            cursor.drop()
            return False
        candidate += char
        while not mark.startswith(candidate):
            deltas.content(candidate[0])
            candidate = candidate[1:]
    cursor.held = mark
    return True
