"""Chat templates: a model's Jinja programs, run in a sandbox like that of transformers, and within bounds."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from jaxinfer.errors import InvalidOption, InvalidTokenizer
from jaxinfer.tokenizers.sandbox import budget_for, make_environment


class ChatTemplate:
    """A model's chat templates, by name, and the special tokens that they may write."""

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Format a conversation as the text that the model was trained on.

        The text contains its special tokens: encode it with ``add_special_tokens=False``. The template sees
        ``variables`` by name; ``tools`` also selects the template named ``tool_use`` if there is one. Raises
        InvalidOption if the messages do not fit the template, and InvalidTokenizer if the template is broken or takes
        more time or memory than any text of these messages needs.
        """
        _check_messages(messages)
        self._check_tool_messages(messages)
        name = "tool_use" if variables.get("tools") is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise InvalidTokenizer(f"the tokenizer has no default chat template, only {', '.join(self.templates)}")
        try:
            given = {"tools": None, "documents": None, **self.special_tokens, **variables}
            given = {key: _to_plain(value) for key, value in given.items()}
            given |= {"messages": _to_plain(messages), "add_generation_prompt": add_generation_prompt}
            with budget_for(given):
                return self._compile(name).render(given)
        except (TemplateSyntaxError, SecurityError) as error:
            raise InvalidTokenizer(f"the chat template cannot be run: {_one_line(error)}") from error
        except TemplateError as error:
            raise InvalidOption(f"the chat template refuses these messages: {_one_line(error)}") from error
        except Exception as error:  # a template is a program that may raise anything
            kind = type(error).__name__
            raise InvalidOption(f"the chat template fails on these messages: {kind}: {_one_line(error)}") from error

    def check(self) -> None:
        """Raise InvalidTokenizer for a template that is no program."""
        for name in self.templates:
            try:
                with budget_for({}):
                    self._compile(name)
            except Exception as error:  # as of any program
                raise InvalidTokenizer(f"the chat template cannot be read: {_one_line(error)}") from error

    def render_with_tools(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        """Format a conversation in which the model is told of tools; raise InvalidOption if its text is as without."""
        text = self.render(messages, tools=tools)
        if text == self.render(messages):
            raise InvalidOption("this model's chat template does not know tools: it writes the same without them")
        return text

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = _make_environment().from_string(self.templates[name])
        return self._compiled[name]

    def _check_tool_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse calls and their results where a template would leave them out without a word."""
        text = "".join(self.templates.values())
        for index, message in enumerate(messages):
            for word, is_there in (("tool_calls", message.get("tool_calls")), ("tool", message["role"] == "tool")):
                if is_there and word not in text:
                    what = "the results of tools" if word == "tool" else "calls of tools"
                    raise InvalidOption(f"message {index}: this model's chat template does not know {what}")


class _GenerationTag(Extension):
    """Supports ``{% generation %}``, which marks the assistant's words; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """A dict constructor without the type's attributes, which would allow an escape from the sandbox."""

    def __call__(self, *args: Any, **entries: Any) -> dict:
        return dict(*args, **entries)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


def _make_environment() -> jinja2.Environment:
    environment = make_environment([_GenerationTag, loopcontrols], _to_json)
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict())
    return environment


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidOption(f"messages must be a list of {{'role', 'content'}} objects, not {type(messages).__name__}")
    if not messages:
        raise InvalidOption("messages is empty: give at least one {'role', 'content'} object")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidOption(f"message {index} must be a {{'role', 'content'}} object, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InvalidOption(f"message {index} has no 'role': name who speaks (system, user or assistant)")


def _to_plain(value: Any) -> Any:
    """Copy nested mappings and sequences to dicts and lists, so that ``tojson`` accepts them."""
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
