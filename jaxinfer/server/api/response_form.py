"""The form of answers to ``/v1/responses``: items, and the events by which a stream builds them."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.results import StreamPiece
from jaxinfer.server.api.choices import Choice, Head
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.sampling import Job
from jaxinfer.server.api.speech import Speech
from jaxinfer.server.tools.deltas import CallBegins, Content, Delta

Event = dict[str, Any]


class _Items:
    """The items of an answer so far; the last one is open until another begins, or the answer ends."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, delta: Delta, speech: Speech) -> Iterable[Event]:
        """Yield the events of a delta of some speech."""
        if isinstance(delta, Content):
            if self._open is None or self._open["type"] != "message":
                yield from self.close("completed")
                yield from self.open_message()
            yield self._text_event("delta", delta=delta.text, logprobs=[])
            self._part["text"] += delta.text
        elif isinstance(delta, CallBegins):
            yield from self.close("completed")
            call = {"name": delta.name, "call_id": speech.calls[delta.index].id, "arguments": ""}
            yield from self._begin({"id": _new_id("fc"), "type": "function_call", "status": "in_progress", **call})
        else:
            yield self._event("response.function_call_arguments.delta", delta=delta.text)
            self._item["arguments"] += delta.text

    def open_message(self) -> Iterable[Event]:
        """Yield the events that begin a message."""
        message = {"id": _new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        yield from self._begin({**message, "content": []})
        self._item["content"] = [{"type": "output_text", "text": "", "annotations": []}]
        yield self._event("response.content_part.added", content_index=0, part=dict(self._part))

    def close(self, status: str) -> Iterable[Event]:
        """Yield the events that end the open item, if there is one."""
        if self._open is None:
            return
        if self._open["type"] == "message":
            yield self._text_event("done", text=self._part["text"], logprobs=[])
            yield self._event("response.content_part.done", content_index=0, part=dict(self._part))
        else:
            yield self._event("response.function_call_arguments.done", arguments=self._item["arguments"])
        self._open["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": self._open}
        self.done.append(self._open)
        self._open = None

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    @property
    def _part(self) -> dict[str, Any]:
        """The only part of the open message."""
        return self._item["content"][0]

    def _begin(self, item: dict[str, Any]) -> Iterable[Event]:
        self._open = item
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}

    def _text_event(self, what: str, **more: Any) -> Event:
        return self._event(f"response.output_text.{what}", content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._item["id"], "output_index": len(self.done), **more}


class ResponseForm:
    """The JSON of the answer to a request, which has one choice; one that comes at once is made from its events."""

    is_typed = True

    def __init__(self, head: Head, job: Job) -> None:
        self._head, self._job = head, job
        self._speech, self._items = Speech(job.tools), _Items()
        self._num_events = 0

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer that comes at once."""
        (choice,) = choices
        piece = StreamPiece(choice.text, tuple(choice.tokens), tuple(choice.texts))
        for _ in (*self.delta(choice, 0, piece), *self.last(choice)):
            pass
        return self._response(_status(choice), usage)

    def first(self, choices: Sequence[Choice]) -> Iterable[Event]:
        """Yield the events before all text."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._response("in_progress", None)})

    def delta(self, choice: Choice, start: int, piece: StreamPiece) -> Iterable[Event]:
        """Yield the events of a piece."""
        yield from self._add(self._speech.take(piece.tokens, piece.texts, piece.text))

    def last(self, choice: Choice) -> Iterable[Event]:
        """Yield the events of what was held back, and those that end the last item; an answer without any has one."""
        yield from self._add(self._speech.finish())
        if not self._speech.content and not self._speech.calls:
            yield from map(self._numbered, self._items.open_message())
        yield from map(self._numbered, self._items.close(_status(choice)))

    def end(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> Iterable[Event]:
        """Yield the event that has the whole answer."""
        (choice,) = choices
        status = _status(choice)
        yield self._numbered({"type": f"response.{status}", "response": self._response(status, usage)})

    def failed(self, error: ApiError) -> Event:
        """Return the event of an answer that failed, with its error."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", None) | {"error": {"code": code, "message": error.message}}
        return self._numbered({"type": "response.failed", "response": response})

    def _add(self, deltas: Sequence[Delta]) -> Iterable[Event]:
        for delta in deltas:
            yield from map(self._numbered, self._items.add(delta, self._speech))

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _response(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "seed": self._head.seed,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **self._job.repeated,
            "background": False,
            "metadata": {},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "output": list(self._items.done),
            "usage": None if usage is None else _usage(usage),
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of `count_usage` by this endpoint's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage["completion_tokens_details"]},
        "total_tokens": usage["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
