"""Reads a call that is written as a JSON object of a name and arguments."""

import json
from collections.abc import Callable, Container

from jaxinfer.server.tools.cursor import END, Cursor, Reading
from jaxinfer.server.tools.deltas import Deltas

_ARGUMENTS = ("arguments", "parameters")
# What models write beside: it is read and forgotten. An object with any other key is no call.
_IGNORED = ("type", "id")
_LONGEST_STRING = 256


class _Call:
    """What is known of an object; it is a call once it has the name of a function, and its arguments have begun."""

    def __init__(self, cursor: Cursor, deltas: Deltas, names: Container[str]) -> None:
        self._cursor, self._deltas, self._names = cursor, deltas, names
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = self.has_begun = False

    def read_member(self) -> Reading[bool]:
        """Read a key and its value; tell whether the object can still be a call."""
        cursor = self._cursor
        yield from cursor.take_space()
        key = yield from read_string(cursor)
        yield from cursor.take_space()
        if key is None or not (yield from cursor.take_text(":")):
            return False
        yield from cursor.take_space()
        if key == "name" and self._name is None:
            self._name = yield from read_string(cursor)
            is_known = self._name is not None and self._name in self._names
        elif key in _ARGUMENTS and not self._has_arguments:
            is_known = yield from self._read_arguments()
        else:
            is_known = key in _IGNORED and (yield from read_value(cursor))
        self._begin_if_known()
        yield from cursor.take_space()
        return is_known

    def _read_arguments(self) -> Reading[bool]:
        if (yield from self._cursor.peek()) != "{":
            return False
        self._has_arguments = True
        self._begin_if_known()
        is_whole = yield from read_value(self._cursor, self._add)
        if self.has_begun:
            self._cursor.drop()
        return is_whole

    def _add(self, text: str) -> None:
        if self.has_begun:
            self._deltas.arguments(text)
        else:
            self._arguments.append(text)

    def _begin_if_known(self) -> None:
        if self.has_begun or self._name is None or not self._has_arguments:
            return
        if self._name in self._names:
            self.has_begun = True
            self._cursor.drop()
            self._deltas.begin_call(self._name)
            self._deltas.arguments("".join(self._arguments))


def read_call(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[bool]:
    """Read an object; tell whether it was a call of one of the functions.

    What the cursor then holds is no part of a call. Arguments are not checked: they end where their brackets do.
    """
    yield from cursor.take_space()
    if not (yield from cursor.take_text("{")):
        return False
    call = _Call(cursor, deltas, names)
    while (yield from call.read_member()):
        if (yield from cursor.take_text(",")):
            continue
        if (yield from cursor.take_text("}")) and call.has_begun:
            cursor.drop()
        break
    return call.has_begun


def read_string(cursor: Cursor) -> Reading[str | None]:
    """Read a JSON string of at most `_LONGEST_STRING` characters; return None if what comes is none."""
    start = len(cursor.held)
    if not (yield from cursor.take_text('"')):
        return None
    while len(cursor.held) - start < _LONGEST_STRING:
        char = yield from cursor.take()
        if char == "\\":
            yield from cursor.take()
        elif char == '"':
            try:
                return json.loads(cursor.held[start:])
            except ValueError:
                return None
        elif char == END:
            return None
    return None


def read_value(cursor: Cursor, add: Callable[[str], None] = lambda text: None) -> Reading[bool]:
    """Read a value to the end of its brackets, or of its word; tell whether it has one.

    Each character goes to ``add`` too.
    """
    depth, is_quoted, count = 0, False, 0
    while True:
        char = yield from cursor.peek()
        if char == END or (depth == 0 and not is_quoted and char in ",}] \t\n\r"):
            return count > 0 and depth == 0 and not is_quoted
        yield from cursor.take()
        add(char)
        count += 1
        if is_quoted and char == "\\":
            add((yield from cursor.take()))
        elif char == '"':
            is_quoted = not is_quoted
        elif not is_quoted and char in "{[":
            depth += 1
        elif not is_quoted and char in "}]":
            depth -= 1
        if depth == 0 and not is_quoted and char in '"}]':
            return True
