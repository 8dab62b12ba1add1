"""Incremental decoding of one generated sequence."""

from collections.abc import Sequence

from jaxinfer.tokenizers.stop_strings import StopStrings
from jaxinfer.tokenizers.tokenizer import Tokenizer

_BROKEN = "\ufffd"
# A character has at most four bytes, so only the last four U+FFFD of a text may still become a character.
_MAX_UNCERTAIN = 4
_WINDOW = 16


class TextStream:
    """Decodes tokens to text as they arrive: ``decode(prompt + generated)`` without the leading ``decode(prompt)``.

    No piece holds half a character, or text that may begin a stop string. Only a moving window of the last tokens is
    decoded. It begins with text that was already emitted, because decoding may drop the first token's leading space.
    The text does not depend on how the tokens are grouped into pushes.
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
        self.num_unread = 0  # last tokens whose text is not read yet: a stop string may end before them

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain, nothing after a stop string."""
        return self._emit([self._push_one(int(token)) for token in token_ids])

    def finish(self) -> str:
        """Return the text held back; incomplete characters become U+FFFD."""
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
        self.num_unread += 1
        # If a run of byte tokens is invalid, it decodes to U+FFFD from its first byte on: wait for the run's end.
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
        """Pass the window's text up to ``end`` to the stop strings; return the text that they release."""
        start = self._consumed
        if text.startswith(self._prompt_broken, start):  # the prompt's incomplete character, not output
            start += len(self._prompt_broken)
        if end <= start:
            return ""
        scan = self._stop.feed(text[start:end])
        if scan.overshoot is not None:
            self.stopped = True
            self.stop_token_index = self._find_stop_token(text, end - scan.overshoot)
        self._prompt_broken = ""
        self._consumed = end
        self.num_unread = 0
        return scan.text

    def _find_stop_token(self, text: str, cut: int) -> int:
        """Return the index of the first unread token at which the window's text reached character ``cut``."""
        for num_later in range(self.num_unread - 1, 0, -1):
            if self._tokenizer.decode(self._window[:-num_later])[:cut] == text[:cut]:
                return self._num_pushed - 1 - num_later
        return self._num_pushed - 1

    def _advance_window(self, text: str) -> None:
        """Move the window's start forward if the shorter window decodes to the same last characters."""
        shorter = self._window[-_WINDOW:]
        tail = self._tokenizer.decode(shorter)
        already_read = len(tail) - (len(text) - self._consumed)
        # With this many emitted characters in front, a split character or a lost leading space at the start would show.
        if already_read > _MAX_UNCERTAIN and text.endswith(tail):
            self._window = shorter
            self._consumed = already_read

    def _find_context(self, prompt: list[int]) -> list[int]:
        """Return enough of the prompt's last tokens to decode the next ones as after the whole prompt."""
        size = _WINDOW
        while size < len(prompt):
            context = prompt[-size:]
            is_whole = context[0] not in self._byte_ids and prompt[-size - 1] not in self._byte_ids
            if is_whole and len(self._tokenizer.decode(context)) > _MAX_UNCERTAIN:
                return context
            size *= 2
        return list(prompt)

    def _ends_in_byte_run(self) -> bool:
        """Tell whether the window ends in a byte token, followed only by tokens without text (special ones)."""
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
    """Return the length of the text without trailing U+FFFD that may still become a character."""
    length = len(text)
    while length > 0 and len(text) - length < _MAX_UNCERTAIN and text[length - 1] == _BROKEN:
        length -= 1
    return length
