"""Conversations to token ids, by a tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate
from jaxinfer.tokenizers.folder_settings import read_template
from jaxinfer.tokenizers.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    opening: str = "",
) -> list[int]:
    """Return the ids of a conversation in the chat template, up to where its answer begins.

    ``tools`` are functions that the answer may call, as JSON objects; the answer begins with ``opening``. Raises
    InvalidOption for tools, calls and results of calls that the template does not know.
    """
    template = tokenizer.chat_template
    if template is None:
        raise InvalidTokenizer("this model has no chat template: give it raw text with generate")
    text = template.render(messages) if tools is None else template.render_with_tools(messages, tools)
    return tokenizer.encode(text + opening, add_special_tokens=False)


def read_chat_template(path: Path) -> ChatTemplate:
    """Return the chat template in a file; raise InvalidTokenizer if there is none."""
    template = ChatTemplate(read_template(path))
    template.check()
    return template


def use_chat_template(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Let a tokenizer's conversations have the form that a template gives them, in place of all that it has itself."""
    own = tokenizer.chat_template
    tokenizer.chat_template = ChatTemplate(template.templates, own.special_tokens if own else None)
