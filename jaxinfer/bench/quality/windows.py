"""Cuts a long text into windows that a model reads one after the other."""

from typing import NamedTuple

from jaxinfer.errors import InvalidOption


class Window(NamedTuple):
    """Tokens ``begin`` to ``end`` are read together; those from ``first`` on are scored."""

    begin: int
    first: int
    end: int


def cut_windows(num_tokens: int, context: int, stride: int) -> list[Window]:
    """Return windows of ``context`` tokens, each ``stride`` tokens after the one before, to the text's end.

    Each token is scored once, in the first window that holds it, but for the first token of a window: no token is
    before it there. So a stride of less than the context scores every token but the first. Raises InvalidOption where
    no token would be scored.
    """
    if not 1 <= stride <= context:
        raise InvalidOption(f"stride {stride} is not 1 to {context}, the tokens of a window")
    windows, scored = [], 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        first = max(begin + 1, scored)
        if first < end:
            windows.append(Window(begin, first, end))
        scored = end
        if end == num_tokens:
            break
    if not windows:
        raise InvalidOption(f"a text of {num_tokens} tokens has none to score: give one of two or more")
    return windows
