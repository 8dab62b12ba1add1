"""The fields that say what an answer may call: ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.grammar.grammar import Grammar
from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, objects, shown
from jaxinfer.server.tools.formats import AUTO, BY_NAME, Function, ToolFormat, find_format
from jaxinfer.server.tools.parser import CallParser
from jaxinfer.tokenizers import Tokenizer

MOST_TOOLS = 128
# The names of functions.
NAME = "[a-zA-Z0-9_-]{1,64}"
_LONGEST_DESCRIPTION = 8192


@dataclass(frozen=True)
class Calling:
    """How the served model calls functions: its format, None if that is not known, and its hidden marks by token."""

    style: ToolFormat | None = None
    hidden: Mapping[int, str] = field(default_factory=dict)


NO_CALLING = Calling()


def calling_of(tokenizer: Tokenizer, tool_format: str) -> Calling:
    """Return how a model calls functions, by the name of a format, or by its chat template for "auto"."""
    template = tokenizer.chat_template
    found = "" if template is None else "".join(template.templates.values())
    style = find_format(found) if tool_format == AUTO else BY_NAME[tool_format]
    return Calling(style, {} if style is None else style.hidden(tokenizer))


@dataclass(frozen=True)
class ToolUse:
    """What one answer may call. ``shown`` are the tools as a template gets them.

    Where the answer must call, ``grammar`` has its texts, and ``opening`` ends the prompt. ``several`` calls may come,
    or one.
    """

    style: ToolFormat
    hidden: Mapping[int, str]
    names: frozenset[str]
    shown: Sequence[Mapping[str, Any]]
    several: bool = True
    grammar: Grammar | None = None

    @property
    def opening(self) -> str:
        """How the answer begins, at the end of its prompt."""
        return self.style.opening if self.grammar is not None else ""

    def parser(self) -> CallParser:
        """Return a parser of one answer."""
        parser = CallParser(self.style.read, self.names)
        parser.feed(self.opening)
        return parser

    def spelled(self, tokens: Sequence[int], texts: Sequence[str], text: str) -> str:
        """Return a text with the hidden marks of its tokens; ``texts`` are the tokens', and may not be all of it."""
        if not any(token in self.hidden for token in tokens):
            return text
        rest = text[sum(map(len, texts)) :]
        return "".join(one + self.hidden.get(token, "") for one, token in zip(texts, tokens)) + rest


def take_tools(fields: Fields, calling: Calling, *, is_flat: bool = False) -> ToolUse | None:
    """Take what an answer may call; None if it may call nothing.

    ``is_flat``: a function's fields stand in its tool, as ``/v1/responses`` has them, and in the choice.
    """
    given, choice = fields.raw("tools"), fields.raw("tool_choice")
    several = fields.flag("parallel_tool_calls", True)
    tools = [] if given in (None, []) else [_read_tool(*one, is_flat) for one in _numbered(fields, given)]
    if not tools:
        if choice not in (None, "none", "auto") or (choice == "auto" and given is None):
            raise wrong_field("tool_choice", "needs tools", "missing_required_parameter")
        if fields.raw("parallel_tool_calls") is not None and given is None:
            raise wrong_field("parallel_tool_calls", "needs tools", "missing_required_parameter")
        return None
    functions = {function.name: function for function, _ in tools}
    if len(functions) < len(tools):
        raise wrong_field("tools", "two functions have the same name")
    called = _read_choice(choice, functions, is_flat)
    if called is None:
        return None
    if calling.style is None:
        reason = "how this model calls functions is not known from its chat template: start with --tool-format"
        raise wrong_field("tools", reason, "unsupported_parameter")
    grammar = calling.style.grammar(called, several=several) if called else None
    shown_tools = [shown_tool for _, shown_tool in tools]
    return ToolUse(calling.style, calling.hidden, frozenset(functions), shown_tools, several, grammar)


def template_options(tools: ToolUse | None) -> dict[str, Any]:
    """Return what a chat template must know of tools: options of `LanguageModel.encode_chat`."""
    return {} if tools is None else {"tools": tools.shown, "opening": tools.opening}


def _numbered(fields: Fields, given: Any) -> list[tuple[str, Mapping[str, Any]]]:
    found = objects(given, fields.name("tools"))
    if len(found) > MOST_TOOLS:
        raise wrong_field("tools", f"has {len(found)} tools, but at most {MOST_TOOLS} are allowed")
    return [(f"{fields.name('tools')}[{index}]", one) for index, one in enumerate(found)]


def _read_tool(name: str, value: Mapping[str, Any], is_flat: bool) -> tuple[Function, Mapping[str, Any]]:
    """Return a function, and the tool as templates know it."""
    outer = Fields(value, f"{name}.")
    if (kind := outer.required("type")) != "function":
        raise wrong_field(f"{name}.type", f"{shown(kind)} is not function: no other tools are implemented")
    inner = outer
    if not is_flat:
        function = outer.required("function")
        if not isinstance(function, dict):
            raise outer.wrong_type("function", function, "an object")
        outer.end()
        inner = Fields(function, f"{name}.function.")
    called = inner.required("name")
    if not isinstance(called, str) or not re.fullmatch(NAME, called):
        raise wrong_field(inner.name("name"), f"{shown(called)} is not 1 to 64 letters, digits, _ and -")
    made: dict[str, Any] = {"name": called, "description": inner.text("description", longest=_LONGEST_DESCRIPTION)}
    inner.flag("strict")  # calls that must come follow the schema anyway
    parameters = inner.raw("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise inner.wrong_type("parameters", parameters, "an object")
    if parameters and parameters.get("type", "object") != "object":
        raise wrong_field(inner.name("parameters"), "is not the schema of an object")
    inner.end()
    # Without a schema a function has no arguments, as OpenAI documents it; an empty one allows any.
    schema = {"type": "object", "properties": {}} if parameters is None else {"type": "object", **parameters}
    return Function(called, schema), {"type": "function", "function": {**made, "parameters": schema}}


def _read_choice(choice: Any, functions: Mapping[str, Function], is_flat: bool) -> Sequence[Function] | None:
    """Return the functions of which one must be called, none of them if none must; None if none may."""
    if choice in (None, "auto"):
        return ()
    if choice == "none":
        return None
    if choice == "required":
        return tuple(functions.values())
    if not isinstance(choice, dict):
        raise wrong_field("tool_choice", f"{shown(choice)} is none of auto, none, required, or a function")
    outer = Fields(choice, "tool_choice.")
    if (kind := outer.required("type")) != "function":
        raise wrong_field("tool_choice.type", f"{shown(kind)} is not function: no other choice is implemented")
    inner = outer
    if not is_flat:
        function = outer.required("function")
        if not isinstance(function, dict):
            raise outer.wrong_type("function", function, "an object")
        outer.end()
        inner = Fields(function, "tool_choice.function.")
    name = inner.required("name")
    inner.end()
    if not isinstance(name, str) or name not in functions:
        raise wrong_field(inner.name("name"), f"{shown(name)} is not the name of a function in tools")
    return (functions[name],)
