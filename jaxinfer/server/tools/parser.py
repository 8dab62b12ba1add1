"""Finds calls of functions in a text that comes in pieces."""

from collections.abc import Container

from jaxinfer.server.tools.cursor import END, Cursor
from jaxinfer.server.tools.deltas import Delta, Deltas
from jaxinfer.server.tools.readers import Reader


class CallParser:
    """Takes the pieces of one text, of any size; what it finds in all of them does not depend on how they are cut.

    A call is of a function that ``names`` has; other text is content, all of it but the white space around calls.
    """

    def __init__(self, read: Reader, names: Container[str]) -> None:
        self._deltas = Deltas()
        self._reading = read(Cursor(), self._deltas, names)
        next(self._reading)

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece; return what is certain by it."""
        for char in text:
            self._reading.send(char)
        return self._deltas.drain()

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text will come."""
        try:
            self._reading.send(END)
        except StopIteration:
            self._deltas.finish()
            return self._deltas.drain()
        raise RuntimeError("a reader of calls went on after the end of its text")
