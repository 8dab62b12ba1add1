"""What becomes of a text that may call functions: content, calls and their arguments, as they become certain."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The next call, of the function ``name``; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsGrow:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Content | CallBegins | ArgumentsGrow


class Deltas:
    """Collects deltas, and leaves out the white space around calls."""

    def __init__(self) -> None:
        self._found: list[Delta] = []
        self._num_calls = 0
        # White space that is left out if a call follows, and whether what comes stands after a call.
        self._space, self._is_after_call = "", False

    def content(self, text: str) -> None:
        """Add text that is no call."""
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._is_after_call = False
            self._found.append(Content(certain))

    def begin_call(self, name: str) -> None:
        """Begin a call; what was certain before is no part of it."""
        self._space, self._is_after_call = "", True
        self._found.append(CallBegins(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun last."""
        self._found.append(ArgumentsGrow(self._num_calls - 1, text))

    def finish(self) -> None:
        """Add what was held back: no more text will come."""
        if self._space:
            self._found.append(Content(self._space))
            self._space = ""

    def drain(self) -> list[Delta]:
        """Return the deltas since the last time, those joined that continue one another."""
        joined: list[Delta] = []
        for delta in self._found:
            last = joined[-1] if joined else None
            if isinstance(delta, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + delta.text)
            elif isinstance(delta, ArgumentsGrow) and isinstance(last, ArgumentsGrow):
                joined[-1] = ArgumentsGrow(last.index, last.text + delta.text)
            else:
                joined.append(delta)
        self._found = []
        return joined
