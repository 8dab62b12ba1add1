"""``/v1/chat/completions``: what its requests may say, and the form of its answers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.server.api.alternatives import with_drawn
from jaxinfer.server.api.choices import Choice, Head
from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, objects, shown
from jaxinfer.server.api.sampling import (
    Job,
    Limits,
    check_job,
    check_model,
    take_delivery,
    take_max_tokens,
    take_sampling,
)

# The newer name of a system message is known to few templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MOST_ALTERNATIVES = 20

# Fields of OpenAI's that are not implemented: why, and the values that ask for nothing.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("tools", "tool calls are not implemented", ([],)),
    ("tool_choice", "tool calls are not implemented", ("none",)),
    ("parallel_tool_calls", "tool calls are not implemented", ()),
    ("functions", "function calls are not implemented", ([],)),
    ("function_call", "function calls are not implemented", ("none",)),
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


def read_chat(body: Mapping[str, Any], limits: Limits, encode_chat: Callable[[list[dict[str, str]]], list[int]]) -> Job:
    """Check a request and return what it asks for."""
    fields = Fields(body)
    check_model(fields, limits)
    messages = read_messages(fields.required("messages"), "messages")
    logprobs = fields.flag("logprobs")
    top_logprobs = fields.whole("top_logprobs", 0, 0, _MOST_ALTERNATIVES) or 0
    if top_logprobs and not logprobs:
        raise wrong_field("top_logprobs", "are part of logprobs: set logprobs to true")
    sampling = take_sampling(fields, limits, logprobs=logprobs)
    max_tokens = take_max_tokens(fields, "max_tokens", None)
    newer = take_max_tokens(fields, "max_completion_tokens", None)
    if None not in (max_tokens, newer) and max_tokens != newer:
        raise wrong_field("max_tokens", "is another than max_completion_tokens: give one")
    delivery = take_delivery(fields)
    for name, reason, harmless in _REFUSED:
        fields.refuse(name, reason, *harmless)
    fields.end()
    prompts = (tuple(encode_chat(messages)),)
    job = Job(prompts, sampling, newer or max_tokens, **delivery, top_logprobs=top_logprobs)
    return check_job(job, limits, "messages")


def read_messages(value: Any, name: str) -> list[dict[str, str]]:
    """Check a conversation; return messages of ``role`` and ``content``."""
    return [_read_message(one, f"{name}[{index}]") for index, one in enumerate(objects(value, name))]


def _read_message(value: Mapping[str, Any], name: str) -> dict[str, str]:
    fields = Fields(value, f"{name}.")
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_field(f"{name}.role", f"{shown(role)} is not one of {', '.join(_ROLES)}")
    content = fields.required("content")
    if isinstance(content, list):
        parts = enumerate(objects(content, f"{name}.content"))
        content = "".join(_read_part(part, f"{name}.content[{index}]") for index, part in parts)
    if not isinstance(content, str):
        raise wrong_field(f"{name}.content", f"{shown(content)} is not a text or a list of parts", "invalid_type")
    fields.refuse("name", "models here do not tell speakers of one role apart")
    for field in ("tool_calls", "function_call"):
        fields.refuse(field, "tool calls are not implemented", [])
    fields.refuse("refusal", "models here do not mark a refusal", "")
    fields.refuse("audio", "only text is read")
    fields.refuse("annotations", "answers here have none", [])
    fields.end()
    return {"role": _ROLES[role], "content": content}


def _read_part(value: Mapping[str, Any], name: str) -> str:
    fields = Fields(value, f"{name}.")
    kind = fields.required("type")
    if kind != "text":
        raise wrong_field(f"{name}.type", f"{shown(kind)} is not text, which is all that is read")
    text = fields.required("text")
    if not isinstance(text, str):
        raise fields.wrong_type("text", text, "a string")
    fields.end()
    return text


class ChatForm:
    """The JSON of answers to a chat request."""

    def __init__(self, head: Head, job: Job) -> None:
        self._head, self._job = head, job

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer that comes at once."""
        made = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                **self._details(choice, 0),
                "finish_reason": choice.finish_reason,
                **self._prompt_ids(choice),
            }
            for choice in choices
        ]
        return self._head.stamp("chat.completion", made, {"usage": usage})

    def first(self, choice: Choice) -> dict[str, Any]:
        """Return the chunk that says who speaks."""
        return self._chunk(choice, {"role": "assistant", "content": None}, None, self._prompt_ids(choice))

    def delta(self, choice: Choice, start: int, text: str) -> dict[str, Any]:
        """Return the chunk of a choice's tokens from ``start`` on."""
        return self._chunk(choice, {"content": text}, None, self._details(choice, start))

    def last(self, choice: Choice) -> dict[str, Any]:
        """Return the chunk that ends a choice."""
        return self._chunk(choice, {}, choice.finish_reason, {})

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream whose usage is asked for."""
        return self._head.stamp("chat.completion.chunk", [], {"usage": usage})

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
        made: dict[str, Any] = {"logprobs": logprobs}
        if self._job.return_token_ids:
            made["token_ids"] = choice.tokens[start:]
        return made


def _alternatives(choice: Choice, place: int) -> list[dict[str, Any]]:
    if not choice.scored.best:
        return []
    drawn = choice.tokens[place], choice.texts[place], choice.logprobs[place]
    return [_entry(one.text, one.bytes, one.logprob) for one in with_drawn(choice.scored.best[place], *drawn)]


def _entry(text: str, content: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(content)}
