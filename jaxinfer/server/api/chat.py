"""``/v1/chat/completions``: what its requests may say, and the form of its answers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.results import StreamPiece
from jaxinfer.server.api.alternatives import with_drawn
from jaxinfer.server.api.choices import Choice, Head, told_of_tokens
from jaxinfer.server.api.errors import ApiError, wrong_field
from jaxinfer.server.api.fields import Fields
from jaxinfer.server.api.messages import read_messages
from jaxinfer.server.api.sampling import (
    Job,
    Limits,
    check_job,
    check_model,
    take_delivery,
    take_max_tokens,
    take_sampling,
)
from jaxinfer.server.api.speech import Speech, whole_speech
from jaxinfer.server.api.tools import NO_CALLING, Calling, take_tools, template_options
from jaxinfer.server.tools.deltas import CallBegins, Content, Delta

_MOST_ALTERNATIVES = 20

# Fields of OpenAI's that are not implemented: why, and the values that ask for nothing.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("functions", "is the older name: use tools", ([],)),
    ("function_call", "is the older name: use tool_choice", ("none",)),
    ("audio", "only text is written", ()),
    ("modalities", "only text is written", (["text"],)),
    ("prediction", "predicted outputs are not implemented: a strategy drafts", ()),
    ("reasoning_effort", "models here reason as much as they do", ()),
    ("verbosity", "models here write as much as they do", ()),
    ("web_search_options", "nothing is searched", ()),
    ("moderation", "nothing is moderated", ()),
    ("store", "nothing is stored", (False,)),
    ("metadata", "nothing is stored", ({},)),
    ("service_tier", "there are no tiers: use priority", ("auto", "default")),
    ("prompt_cache_key", "prompts are found by their tokens: use cache_salt to keep them apart", ()),
    ("prompt_cache_retention", "cached prompts stay as long as there is room", ()),
    ("safety_identifier", "nobody looks at it: use user", ()),
)


def read_chat(
    body: Mapping[str, Any], limits: Limits, encode_chat: Callable[..., list[int]], calling: Calling = NO_CALLING
) -> Job:
    """Check a request and return what it asks for; ``encode_chat`` is that of `LanguageModel`."""
    fields = Fields(body)
    adapter = check_model(fields, limits)
    messages = read_messages(fields.required("messages"), "messages")
    tools = take_tools(fields, calling)
    logprobs = fields.flag("logprobs")
    top_logprobs = fields.whole("top_logprobs", 0, 0, _MOST_ALTERNATIVES) or 0
    if top_logprobs and not logprobs:
        raise wrong_field("top_logprobs", "are part of logprobs: set logprobs to true")
    sampling = take_sampling(fields, limits, logprobs=logprobs, tools=tools)
    max_tokens = take_max_tokens(fields, "max_tokens", None)
    newer = take_max_tokens(fields, "max_completion_tokens", None)
    if None not in (max_tokens, newer) and max_tokens != newer:
        raise wrong_field("max_tokens", "is another than max_completion_tokens: give one")
    delivery = take_delivery(fields)
    for name, reason, harmless in _REFUSED:
        fields.refuse(name, reason, *harmless)
    fields.end()
    ids = encode_chat(messages, **template_options(tools))
    job = Job(
        (tuple(ids),),
        sampling,
        newer or max_tokens,
        **delivery,
        top_logprobs=top_logprobs,
        tools=tools,
        adapter=adapter,
    )
    return check_job(job, limits, "messages")


class ChatForm:
    """The JSON of answers to a chat request."""

    is_typed = False

    def __init__(self, head: Head, job: Job) -> None:
        self._head, self._job = head, job
        self._speeches: defaultdict[int, Speech] = defaultdict(lambda: Speech(job.tools))

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer that comes at once."""
        return self._head.stamp("chat.completion", [self._whole(choice) for choice in choices], {"usage": usage})

    def first(self, choices: Sequence[Choice]) -> Iterable[dict[str, Any]]:
        """Yield the chunks that say who speaks."""
        for choice in choices:
            yield self._chunk(choice, {"role": "assistant", "content": None}, None, self._prompt_ids(choice))

    def delta(self, choice: Choice, start: int, piece: StreamPiece) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a choice's tokens from ``start`` on; what is told of tokens comes with the first."""
        speech, details = self._speeches[choice.index], self._details(choice, start)
        deltas = speech.take(piece.tokens, piece.texts, piece.text)
        said = [_said(speech, delta) for delta in deltas]
        if not said and piece.tokens and self._job.tells_tokens:
            said = [{"content": ""}]
        for index, one in enumerate(said):
            yield self._chunk(choice, one, None, self._details(choice, len(choice.tokens)) if index else details)

    def last(self, choice: Choice) -> Iterable[dict[str, Any]]:
        """Yield what was held back of a choice, and the chunk that ends it."""
        speech = self._speeches[choice.index]
        for delta in speech.finish():
            yield self._chunk(choice, _said(speech, delta), None, {})
        yield self._chunk(choice, {}, speech.finish_reason(choice), {})

    def end(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """Yield the chunk of the usage, if it is asked for."""
        if self._job.include_usage:
            yield self._head.stamp("chat.completion.chunk", [], {"usage": usage})

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the error."""
        return error.body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        speech = whole_speech(choice, self._job.tools)
        message: dict[str, Any] = {"role": "assistant", "content": speech.content, "refusal": None}
        if speech.calls:
            message["content"] = speech.content or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in speech.calls]
        return {
            "index": choice.index,
            "message": message,
            **self._details(choice, 0),
            "finish_reason": speech.finish_reason(choice),
            **self._prompt_ids(choice),
        }

    def _chunk(
        self, choice: Choice, delta: Mapping[str, Any], finish_reason: str | None, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        one = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
        return self._head.stamp("chat.completion.chunk", [one], {"usage": None} if self._job.include_usage else {})

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": list(choice.prompt)} if self._job.return_token_ids else {}

    def _details(self, choice: Choice, start: int) -> dict[str, Any]:
        """Return what is asked for of the tokens from ``start`` on."""
        logprobs = None
        if self._job.sampling.logprobs:
            entries = [
                {**_entry(text, text.encode(), value), "top_logprobs": _alternatives(choice, place)}
                for place, (text, value) in enumerate(zip(choice.texts[start:], choice.logprobs[start:]), start)
            ]
            logprobs = {"content": entries, "refusal": None}
        told = told_of_tokens(choice, start, ids=self._job.return_token_ids, drafts=self._job.return_drafts)
        return {"logprobs": logprobs, **told}


def _alternatives(choice: Choice, place: int) -> list[dict[str, Any]]:
    if not choice.scored.best:
        return []
    drawn = choice.tokens[place], choice.texts[place], choice.logprobs[place]
    return [_entry(one.text, one.bytes, one.logprob) for one in with_drawn(choice.scored.best[place], *drawn)]


def _entry(text: str, content: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(content)}


def _said(speech: Speech, delta: Delta) -> dict[str, Any]:
    """Return the ``delta`` of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, CallBegins):
        return {"tool_calls": [{"index": delta.index, **_call(speech.calls[delta.index].id, delta.name, "")}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
