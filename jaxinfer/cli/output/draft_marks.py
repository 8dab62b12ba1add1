"""Shows which tokens of a streamed text were accepted from drafts: in colour on a terminal, between marks elsewhere."""

import os
import sys

from jaxinfer.results import StreamPiece

_GREEN, _RESET = "\033[32m", "\033[0m"
_OPEN, _CLOSE = "{+", "+}"


def colours_drafts() -> bool:
    """Tell whether standard output shows colours and the user has not forbidden them (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class DraftMarks:
    """Marks a text piece by piece; runs of accepted tokens go through pieces."""

    def __init__(self, is_coloured: bool) -> None:
        self._begin, self._end = (_GREEN, _RESET) if is_coloured else (_OPEN, _CLOSE)
        self._is_coloured = is_coloured
        self._is_open = False

    @property
    def legend(self) -> str:
        """Say what the marks mean."""
        shown = "green" if self._is_coloured else f"between {_OPEN} and {_CLOSE}"
        return f"[{shown}: accepted from a draft; all else: the target's own]"

    def mark(self, piece: StreamPiece) -> str:
        """Return a piece's text with its marks; the last piece closes what is open."""
        marked = "".join(self._switch(is_draft) + text for text, is_draft in zip(piece.texts, piece.from_draft) if text)
        rest = piece.text[sum(map(len, piece.texts)) :]
        if rest or piece.result is not None:
            marked += self._switch(False) + rest
        # A terminal must not stay green where the text is cut short.
        return marked + self._switch(False) if self._is_coloured else marked

    def _switch(self, is_draft: bool) -> str:
        if is_draft == self._is_open:
            return ""
        self._is_open = is_draft
        return self._begin if is_draft else self._end
