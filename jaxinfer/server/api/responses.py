"""``/v1/responses``: what its requests may say. Nothing is stored, so each brings its whole conversation."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.grammar.grammar import Grammar
from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields
from jaxinfer.server.api.grammars import read_format
from jaxinfer.server.api.response_input import read_input
from jaxinfer.server.api.sampling import (
    Job,
    Limits,
    check_job,
    check_model,
    take_delivery,
    take_max_tokens,
    take_sampling,
)
from jaxinfer.server.api.tools import NO_CALLING, Calling, take_tools, template_options

# Fields that are not implemented: why, and the values that ask for nothing.
_REFUSED: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("previous_response_id", "nothing is stored: send the whole conversation as input", ()),
    ("conversation", "nothing is stored: send the whole conversation as input", ()),
    ("store", "nothing is stored", (False,)),
    ("metadata", "nothing is stored", ({},)),
    ("prompt", "nothing is stored: send the prompt as input", ()),
    ("background", "answers come to who waits for them", (False,)),
    ("background_options", "answers come to who waits for them", ()),
    ("context_management", "nothing is left out of a conversation", ([],)),
    ("truncation", "nothing is left out of a conversation", ("disabled",)),
    ("include", "there is nothing that could be included", ([],)),
    ("top_logprobs", "log-probabilities are told by /v1/chat/completions", (0,)),
    ("logprobs", "log-probabilities are told by /v1/chat/completions", (False,)),
    ("return_token_ids", "token ids are told by /v1/chat/completions", (False,)),
    ("return_drafts", "what drafts gave is told by /v1/chat/completions", (False,)),
    ("reasoning", "models here reason as much as they do", ({},)),
    ("max_tool_calls", "no built-in tools are called", ()),
    ("n", "has one answer: use /v1/chat/completions", (1,)),
    ("response_format", "is text.format here", ()),
    ("max_tokens", "is max_output_tokens here", ()),
    ("messages", "is input here", ()),
    ("access_programs", "there is nothing to have access to", ()),
    ("image", "only text is read", ()),
    ("moderation", "nothing is moderated", ()),
    ("service_tier", "there are no tiers: use priority", ("auto", "default")),
    ("prompt_cache_key", "prompts are found by their tokens: use cache_salt to keep them apart", ()),
    ("prompt_cache_options", "cached prompts stay as long as there is room", ()),
    ("prompt_cache_retention", "cached prompts stay as long as there is room", ()),
    ("safety_identifier", "nobody looks at it: use user", ()),
)
# What an answer repeats of its request, and what it says where the request says nothing.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "text": {"format": {"type": "text"}},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}


def read_response(
    body: Mapping[str, Any], limits: Limits, encode_chat: Callable[..., list[int]], calling: Calling = NO_CALLING
) -> Job:
    """Check a request and return what it asks for; ``encode_chat`` is that of `LanguageModel`."""
    fields = Fields(body)
    adapter = check_model(fields, limits)
    for name, reason, harmless in _REFUSED:
        fields.refuse(name, reason, *harmless)
    messages = read_input(fields.required("input"), fields.text("instructions"))
    tools = take_tools(fields, calling, is_flat=True)
    sampling = take_sampling(fields, limits, logprobs=False, tools=tools, take_grammar=_take_grammar)
    max_tokens = take_max_tokens(fields, "max_output_tokens", None)
    delivery = take_delivery(fields)
    if delivery["include_usage"]:
        raise wrong_field("stream_options.include_usage", "is no field here: the last event always has the usage")
    fields.end()
    ids = encode_chat(messages, **template_options(tools))
    repeated = {name: default if body.get(name) is None else body[name] for name, default in _REPEATED.items()}
    job = Job((tuple(ids),), sampling, max_tokens, **delivery, tools=tools, repeated=repeated, adapter=adapter)
    return check_job(job, limits, "input")


def _take_grammar(fields: Fields) -> tuple[str, Grammar | None]:
    """Take ``text.format``; return its name and its grammar."""
    text = fields.raw("text")
    if text is None:
        return "text.format", None
    if not isinstance(text, dict):
        raise fields.wrong_type("text", text, "an object")
    inner = Fields(text, "text.")
    asked = inner.raw("format")
    inner.refuse("verbosity", "models here write as much as they do", "medium")
    inner.end()
    return "text.format", None if asked is None else read_format(asked, "text.format", is_flat=True)
