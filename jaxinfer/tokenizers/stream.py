"""Incremental decoding of one generated sequence."""

from collections.abc import Sequence

from jaxinfer.tokenizers.stop_strings import StopStrings
from jaxinfer.tokenizers.tokenizer import Tokenizer

_BROKEN = "\ufffd"
# A character has at most four bytes, so at most this many U+FFFD at the end may still turn into one.
_MAX_UNCERTAIN = 4
_WINDOW = 16


class TextStream:
    """Turn tokens into text as they come: ``decode(prompt + generated)`` without its beginning ``decode(prompt)``.

    No piece holds half a character, nor text that could be the beginning of a stop string. Only a window of the last
    tokens is decoded, whose start moves along; it begins with text already emitted because the first token of a
    decoding may lose its leading space. Pieces do not depend on how the tokens are grouped into pushes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()):
        self.stopped = False
        self.stop_token_index: int | None = None
        self._tokenizer = tokenizer
        self._byte_ids: frozenset[int] = getattr(tokenizer, "byte_fallback_ids", frozenset())
        self._stop = StopStrings(stop)
        self._pieces: list[str] = []
        self._num_pushed = 0
        self._window = self._find_context([int(token) for token in prompt_ids])
        text = tokenizer.decode(self._window)
        self._consumed = _measure_certain(text)  # characters of the window's text
        self._prompt_broken = text[self._consumed :]
        self._num_unread = 0  # tokens at the window's end whose text is not consumed yet

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is now certain; once stopped, take nothing."""
        return self._emit([self._push_one(int(token)) for token in token_ids])

    def finish(self) -> str:
        """Return what was held back, incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._consume(text, len(text))
        return self._emit([piece, self._stop.flush()])

    def _push_one(self, token: int) -> str:
        if self.stopped:
            return ""
        self._window.append(token)
        self._num_pushed += 1
        self._num_unread += 1
        # A run of byte tokens that turns out invalid decodes to U+FFFD from its first byte on: wait for its end.
        if token in self._byte_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        if self._byte_ids and self._ends_in_byte_run():
            return ""
        piece = self._consume(text, _measure_certain(text))
        if len(self._window) > 2 * _WINDOW:
            self._advance_window(text)
        return piece

    def _consume(self, text: str, end: int) -> str:
        """Pass the window's text up to ``end`` to the stop strings; return what they let through."""
        start = self._consumed
        if text.startswith(self._prompt_broken, start):  # what the prompt left incomplete stayed so: not our text
            start += len(self._prompt_broken)
        if end <= start:
            return ""
        scan = self._stop.feed(text[start:end])
        if scan.overshoot is not None:
            self.stopped = True
            self.stop_token_index = self._find_stop_token(text, end - scan.overshoot)
        self._prompt_broken = ""
        self._consumed = end
        self._num_unread = 0
        return scan.text

    def _find_stop_token(self, text: str, cut: int) -> int:
        """Return the index of the first unread token by which the window's text reached its character ``cut``."""
        for num_later in range(self._num_unread - 1, 0, -1):
            if self._tokenizer.decode(self._window[:-num_later])[:cut] == text[:cut]:
                return self._num_pushed - 1 - num_later
        return self._num_pushed - 1

    def _advance_window(self, text: str) -> None:
        """Start the window later, where the text of the shorter window provably ends like that of the longer."""
        shorter = self._window[-_WINDOW:]
        tail = self._tokenizer.decode(shorter)
        already_read = len(tail) - (len(text) - self._consumed)
        # With this much read text in front, a character or a leading space cut by the new start would show.
        if already_read > _MAX_UNCERTAIN and text.endswith(tail):
            self._window = shorter
            self._consumed = already_read

    def _find_context(self, prompt: list[int]) -> list[int]:
        """Return the last tokens of the prompt, enough to decode what follows as if all of it stood there."""
        size = _WINDOW
        while size < len(prompt):
            context = prompt[-size:]
            is_whole = context[0] not in self._byte_ids and prompt[-size - 1] not in self._byte_ids
            if is_whole and len(self._tokenizer.decode(context)) > _MAX_UNCERTAIN:
                return context
            size *= 2
        return list(prompt)

    def _ends_in_byte_run(self) -> bool:
        """Tell whether only tokens without text (special ones) stand after a byte token at the window's end."""
        for token in reversed(self._window):
            if token in self._byte_ids:
                return True
            if self._tokenizer.decode([token]):
                return False
        return False

    def _emit(self, pieces: list[str]) -> str:
        piece = "".join(pieces)
        if piece:
            self._pieces.append(piece)
        return piece


def _measure_certain(text: str) -> int:
    """Return the length of the text without the U+FFFD at its end that may still become a character."""
    length = len(text)
    while length > 0 and len(text) - length < _MAX_UNCERTAIN and text[length - 1] == _BROKEN:
        length -= 1
    return length
