"""What an answer says: its content, and the functions that it calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.server.api.choices import Choice
from jaxinfer.server.api.tools import ToolUse
from jaxinfer.server.tools.deltas import ArgumentsGrow, CallBegins, Content, Delta


@dataclass
class Call:
    """A call so far; ``arguments`` are the JSON text that the model wrote, which may be cut off."""

    id: str
    name: str
    arguments: str = ""


class Speech:
    """The content and the calls of one choice, as its pieces come."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._parser = None if tools is None else tools.parser()
        self.content = ""
        self.calls: list[Call] = []

    def take(self, tokens: Sequence[int], texts: Sequence[str], text: str) -> list[Delta]:
        """Add a piece; return what is certain by it."""
        if self._tools is None or self._parser is None:
            return self._add([Content(text)] if text else [])
        return self._add(self._parser.feed(self._tools.spelled(tokens, texts, text)))

    def finish(self) -> list[Delta]:
        """Return what was held back: no more pieces will come."""
        return [] if self._parser is None else self._add(self._parser.finish())

    def finish_reason(self, choice: Choice) -> str | None:
        """Return why the choice has ended: ``tool_calls`` for one that has called and is not cut off."""
        return "tool_calls" if self.calls and choice.finish_reason == "stop" else choice.finish_reason

    def _add(self, deltas: list[Delta]) -> list[Delta]:
        """Remember deltas; leave out the calls after the first where only one may come."""
        is_single = self._tools is not None and not self._tools.several
        kept = [delta for delta in deltas if isinstance(delta, Content) or not (is_single and delta.index)]
        for delta in kept:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, CallBegins) and self._tools is not None:
                self.calls.append(Call(self._tools.style.new_id(), delta.name))
            elif isinstance(delta, ArgumentsGrow):
                self.calls[delta.index].arguments += delta.text
        return kept


def whole_speech(choice: Choice, tools: ToolUse | None) -> Speech:
    """Return what a choice says that has ended."""
    speech = Speech(tools)
    speech.take(choice.tokens, choice.texts, choice.text)
    speech.finish()
    return speech
