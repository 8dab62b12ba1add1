"""How models of several families write calls, read from their text; anything else in it is content."""

from collections.abc import Callable, Container

from jaxinfer.server.tools.call import read_call, read_value
from jaxinfer.server.tools.cursor import END, Cursor, Reading, seek
from jaxinfer.server.tools.deltas import Deltas

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG, LLAMA_NEXT = "<|python_tag|>", ";"
MISTRAL_OPEN, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LONGEST_NAME = 64


# Reads a whole text for calls of the functions of some names, and returns only at its end.
Reader = Callable[[Cursor, Deltas, Container[str]], Reading[None]]


def read_hermes(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[None]:
    """Read text with calls, each an object between a mark and another; the second may be missing."""
    while (yield from seek(cursor, deltas, HERMES_OPEN)):
        if (yield from read_call(cursor, deltas, names)) and not cursor.held:
            yield from cursor.take_space()
            if (yield from cursor.take_text(HERMES_CLOSE)):
                cursor.drop()


def read_llama(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[None]:
    """Read a text that is calls from its beginning on, one or several; after other text none is looked for."""
    while True:
        yield from cursor.take_space()
        if (yield from cursor.peek()) == LLAMA_TAG[0] and not (yield from cursor.take_text(LLAMA_TAG)):
            break
        if not (yield from read_call(cursor, deltas, names)) or cursor.held:
            break
        yield from cursor.take_space()
        yield from cursor.take_text(LLAMA_NEXT)
    deltas.content(cursor.held)
    while (char := (yield from cursor.take())) != END:
        deltas.content(char)


def read_mistral(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[None]:
    """Read text with calls after a mark: a list of objects, or a name, another mark and the arguments."""
    while (yield from seek(cursor, deltas, MISTRAL_OPEN)):
        yield from cursor.take_space()
        if (yield from cursor.peek()) == "[":
            yield from _read_list(cursor, deltas, names)
        else:
            yield from _read_named(cursor, deltas, names)


def _read_list(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[None]:
    yield from cursor.take()
    while (yield from read_call(cursor, deltas, names)) and not cursor.held:
        yield from cursor.take_space()
        if not (yield from cursor.take_text(",")):
            if (yield from cursor.take_text("]")):
                cursor.drop()
            break


def _read_named(cursor: Cursor, deltas: Deltas, names: Container[str]) -> Reading[None]:
    name = yield from _read_word(cursor)
    if name not in names or not (yield from cursor.take_text("[")):
        return
    # The id that some versions write here is the model's own: clients get another.
    if (yield from cursor.peek()) == MISTRAL_ID[1]:
        if not (yield from cursor.take_text(MISTRAL_ID[1:])):
            return
        yield from _read_word(cursor)
        yield from cursor.take_text("[")
    if not (yield from cursor.take_text(MISTRAL_ARGUMENTS[1:])):
        return
    yield from cursor.take_space()
    if (yield from cursor.peek()) == "{":
        deltas.begin_call(name)
        yield from read_value(cursor, deltas.arguments)
        cursor.drop()


def _read_word(cursor: Cursor) -> Reading[str]:
    """Read letters, digits, ``_`` and ``-``."""
    start = len(cursor.held)
    while (char := (yield from cursor.peek())) != END and (char.isalnum() or char in "_-"):
        if len(cursor.held) - start == _LONGEST_NAME:
            break
        yield from cursor.take()
    return cursor.held[start:]
