"""A model's format is known by its template; a grammar of calls has those that the parser reads, and no others."""

import json
from typing import Any

import numpy as np
import pytest

from jaxinfer.grammar.automaton import DEAD, Automaton, automaton
from jaxinfer.server.tools.formats import BY_NAME, FORMATS, Function, find_format
from tests.server.tools.test_parser import ALL, joined, parse

FUNCTIONS = (
    Function("f", {"type": "object", "properties": {}}),
    Function(
        "look_up",
        {
            "type": "object",
            "properties": {"what": {"$ref": "#/$defs/what"}, "times": {"type": "integer"}},
            "required": ["what"],
            "$defs": {"what": {"type": "string", "maxLength": 4}},
        },
    ),
)


def walk(found: Automaton, seed: int) -> str:
    """Return a text of an automaton, drawn at random."""
    rng, state, text = np.random.default_rng(seed), 0, b""
    while not (found.ends_N[state] and (rng.random() < 0.5 or (found.next_NB[state] == DEAD).all())):
        may = np.flatnonzero(found.next_NB[state] != DEAD)
        # Letters are enough of strings, and quotes must come soon.
        plain = [byte for byte in may if byte < 128]
        text += bytes([rng.choice(plain)])
        state = found.next_NB[state, text[-1]]
    return text.decode()


@pytest.mark.slow
@pytest.mark.parametrize("form", ALL)
def test_a_grammars_texts_are_calls_that_follow_their_schemas(form: str) -> None:
    style = BY_NAME[form]
    names = {function.name for function in FUNCTIONS}
    found = automaton(style.grammar(FUNCTIONS, several=True))
    most, seen = 0, set()
    for seed in range(40):
        content, calls = joined(parse(form, [style.opening, walk(found, seed)]))
        assert content == ""
        assert calls
        most = max(most, len(calls))
        for name, text in calls:
            seen.add(name)
            arguments = json.loads(text)
            assert set(arguments) in (({"what"}, {"what", "times"}) if name == "look_up" else (set(),))
            assert len(arguments.get("what", "")) <= 4
            assert isinstance(arguments.get("times", 0), int)
    assert most > 1
    assert seen == names


def test_one_call_is_one_call() -> None:
    found = automaton(BY_NAME["hermes"].grammar(FUNCTIONS[:1], several=False))
    for seed in range(5):
        assert joined(parse("hermes", [walk(found, seed)])) in [("", [("f", "{}")]), ("", [("f", "{ }")])]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('<|start_header_id|>{"name": "{{ name }}", "parameters": {{ arguments }}', "llama3"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS] [{{ calls }}]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral-named"),
        ("<tool_call>\n<function={{ name }}>\n<parameter= arguments", None),
        ("{{ message.content }}", None),
    ],
)
def test_formats_are_known_by_templates(template: str, form: str | None) -> None:
    found = find_format(template)
    assert (found and found.name) == form


class Words:
    """As much of a tokenizer as marks need: two special tokens, and one that is not."""

    vocab_size, bos_token_id, eos_token_ids, chat_template = 8, None, (), None
    ids = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "<tool_call>": 7}  # noqa: RUF012

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1, self.ids[text]] if text in self.ids else [1, 2, 3]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text = {number: name for name, number in self.ids.items()}.get(ids[0], "x")
        return "" if skip_special_tokens and ids[0] in (5, 6) else text


def test_marks_that_are_special_tokens_are_known_by_their_ids() -> None:
    tokenizer: Any = Words()
    found = [style.hidden(tokenizer) for style in FORMATS]
    assert found == [{}, {}, {5: "[TOOL_CALLS]"}, {5: "[TOOL_CALLS]", 6: "[ARGS]"}]


def test_ids_of_calls_are_new_and_as_templates_ask_for_them() -> None:
    for style in FORMATS:
        made = {style.new_id() for _ in range(9)}
        assert len(made) == 9
        assert all(one.replace("call_", "").isalnum() for one in made)
    assert len(BY_NAME["mistral"].new_id()) == 9
