"""Calls and content that are found in a text do not depend on how it is cut, and nothing of it is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.server.tools.deltas import ArgumentsGrow, CallBegins, Content, Delta
from jaxinfer.server.tools.formats import BY_NAME
from jaxinfer.server.tools.parser import CallParser

NAMES = ("look_up", "f")
# Of such parts, in any order, come calls, what is nearly one, and marks that are cut off.
PARTS = (
    "<tool_call>", "</tool_call>", "<tool_call>\n", "</tool", "<", "[TOOL_CALLS]", "[TOOL_CALLS] [", "[ARGS]",
    "[CALL_ID]", "[", "]", "; ", ", ", "<|python_tag|>", "<|py", "{", "}", '"', "\\", '"name": "f"', '"name": "g"',
    '"arguments": ', '"parameters": {', '{"a": "}\\""}', "{}",
    '{"name": "look_up", "arguments": {"q": [1, {"r": "<tool_call>"}]}}',
    '{"name": "f", "parameters": {}}', '{"arguments": {"b": 2}, "name": "f"}', "f", " ", "\n", "Well, é", "3",
)  # fmt: skip
ALL = sorted(BY_NAME)


def parse(form: str, pieces: list[str]) -> list[Delta]:
    parser = CallParser(BY_NAME[form].read, NAMES)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def joined(deltas: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """Return all content, and the calls: their names and arguments. Calls must come in order, whole before the next."""
    content, calls = "", []
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, CallBegins):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        else:
            assert isinstance(delta, ArgumentsGrow)
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return content, calls


def read(form: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    return joined(parse(form, [text]))


@pytest.mark.parametrize("form", ALL)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_the_cuts_change_nothing(form: str, parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(pieces[-1]), turn + 1
        if not any(sizes):
            break
    whole = read(form, text)
    assert joined(parse(form, [*pieces, text[at:]])) == whole
    assert joined(parse(form, list(text))) == whole
    content, calls = whole
    if not calls:
        assert content == text
    # All that comes out stands in the text, in this order.
    rest = iter(text)
    came = "".join(getattr(delta, "text", "") for delta in parse(form, [text]))
    assert all(char in rest for char in came)


def written(form: str, calls: list[tuple[str, str]], is_turned: bool) -> str:
    """Return calls as models of a format write them; ``is_turned``: arguments before names, where this may be."""
    key = "parameters" if form == "llama3" else "arguments"
    made = [
        f'{{"{key}": {arguments}, "name": "{name}"}}' if is_turned else f'{{"name": "{name}", "{key}": {arguments}}}'
        for name, arguments in calls
    ]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in made)
    if form == "llama3":
        return "; ".join(made)
    if form == "mistral":
        return f"[TOOL_CALLS] [{', '.join(made)}]"
    return "".join(f"[TOOL_CALLS]{name}{'[CALL_ID]abc123456' * is_turned}[ARGS]{given}" for name, given in calls)


ARGUMENTS: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a\\"}{] <é\n', max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('k"{', max_size=2), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize("form", ALL)
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    before=st.sampled_from(["", "Let me see. ", "a < b [1]\n"]),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("ab", max_size=2), ARGUMENTS)), max_size=3
    ),
    is_turned=st.booleans(),
)
def test_calls_are_found_as_they_were_written(form: str, before: str, calls: Any, is_turned: bool) -> None:
    asked = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    before = before if form != "llama3" else ""
    text = before + (written(form, asked, is_turned) if asked else "")
    assert read(form, text) == (before.rstrip() if asked else before, asked)


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        # Not the name of a function; no arguments; arguments that are a text; another key; no name.
        ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "f", "why": 1, "arguments": {}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call> so', None, []),
        # Without the second mark; with more than a call; one that is cut off; one begun anew.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} so</tool_call>!', "so</tool_call>!", [("f", "{}")]),
        ("hermes", 'I <tool_call> {"name": "f", "arguments": {"a', "I", [("f", '{"a')]),
        ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}', "<tool_call>", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}', "",
         [("f", "{}"), ("f", "{}")]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3", 'Use {"name": "f", "parameters": {}}', None, []),
        ("llama3", '{"name": "f", "parameters": {}} and', "and", [("f", "{}")]),
        ("llama3", '{"city": "Paris"}', None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', ', {"name": "g"}]', [("f", "{}")]),
        ("mistral-named", "[TOOL_CALLS]g[ARGS]{}", None, []),
        ("mistral-named", "[TOOL_CALLS]f[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f", [("f", "{}")]),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(form: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert read(form, text) == (text if content is None else content, calls)


def test_arguments_come_while_they_are_written() -> None:
    parser = CallParser(BY_NAME["hermes"].read, NAMES)
    assert parser.feed('So <tool_call>{"name": "f", "argu') == [Content("So")]
    assert parser.feed('ments": {"a": ') == [CallBegins(0, "f"), ArgumentsGrow(0, '{"a": ')]
    assert parser.feed('"x') == [ArgumentsGrow(0, '"x')]
    assert parser.feed('"}}</tool_call>\n') == [ArgumentsGrow(0, '"}')]
    assert parser.finish() == []
