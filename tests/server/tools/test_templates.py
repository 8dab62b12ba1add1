"""Tools, calls and results reach a model as its family's templates write them, and calls they wrote are read back."""

import json
from typing import Any

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.fields import Fields
from jaxinfer.server.api.messages import read_messages
from jaxinfer.server.api.tools import Calling, ToolUse, take_tools
from jaxinfer.server.tools.formats import find_format
from jaxinfer.tokenizers import ChatTemplate
from tests.server.tools.templates import TEMPLATES
from tests.server.tools.test_parser import joined

FUNCTION = {
    "name": "look_up",
    "description": "Finds a word's meaning, in full.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]
QUESTION = {"role": "user", "content": "What is an écart <b>?"}
ARGUMENTS = {"word": 'é "<tool_call>" \\ {x}', "n": [1, None, {"a": True}]}
NAMES = sorted(TEMPLATES)


def use(name: str, **fields: Any) -> ToolUse | None:
    style = find_format(TEMPLATES[name][0])
    return take_tools(Fields({"tools": TOOLS, **fields}), Calling(style))


def asked(name: str, **fields: Any) -> ToolUse:
    found = use(name, **fields)
    assert found is not None
    return found


def render(name: str, messages: list[dict[str, Any]], tools: ToolUse | None = None, **options: Any) -> str:
    """Return the text of a conversation as clients send it, which must know the tools if it is told of any."""
    template = ChatTemplate(TEMPLATES[name][0], {"bos_token": "<s>", "eos_token": "</s>"})
    read = read_messages(messages, "messages")
    return template.render(read, **options) if tools is None else template.render_with_tools(read, tools.shown)


def called(name: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with calls, their ids as the server gives them."""
    tools = asked(name)
    made = [
        {"id": tools.style.new_id(), "type": "function", "function": {"name": one, "arguments": json.dumps(arguments)}}
        for one, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": one["id"], "content": f"result {index}"}
        for index, one in enumerate(message["tool_calls"])
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_its_calls_is_known(name: str) -> None:
    style = find_format(TEMPLATES[name][0])
    assert style is not None
    assert style.name == TEMPLATES[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_the_tools_are_shown_with_their_schemas(name: str) -> None:
    text = render(name, [QUESTION], asked(name))
    for tool in asked(name).shown:
        function = tool["function"]
        assert f'"{function["name"]}"' in text
        assert function["description"] in text
        assert json.dumps(function["parameters"]["properties"], ensure_ascii=False) in " ".join(text.split()).replace(
            "{ ", "{"
        ).replace(" }", "}")
    assert QUESTION["content"] in text
    assert text.count(QUESTION["content"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_who_may_not_call_is_told_of_no_tool(name: str) -> None:
    assert use(name, tool_choice="none") is None
    assert "look_up" not in render(name, [QUESTION])
    tools = asked(name, tool_choice={"type": "function", "function": {"name": "now"}})
    # All are shown, one may be called.
    assert "look_up" in render(name, [QUESTION], tools)
    assert tools.grammar == asked(name, tools=TOOLS[1:], tool_choice="required").grammar


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_it_writes_are_read_back(name: str, count: int) -> None:
    """What a template writes of an answer's calls is what the model was taught to write."""
    message = called(name, ("look_up", ARGUMENTS), ("now", {}))
    del message["tool_calls"][count:]
    if name == "llama3" and count > 1:
        with pytest.raises(InvalidOption, match="Only one call at a time"):
            render(name, [QUESTION, message], asked(name))
        return
    before = render(name, [QUESTION], asked(name))
    text = render(name, [QUESTION, message], asked(name))
    end = TEMPLATES[name][2]
    answer = text.rpartition(QUESTION["content"])[2]
    answer = answer[len(before.rpartition(QUESTION["content"])[2].removesuffix("\n")) :].rpartition(end)[0]
    for size in (1, 7, len(answer)):
        parser = asked(name).parser()
        pieces = (answer[at : at + size] for at in range(0, len(answer), size))
        content, found = joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())
        # An empty thought is all that comes before calls.
        assert content.replace("<think>\n\n</think>", "").strip() == ""
        wanted = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
        assert [(one, json.loads(arguments)) for one, arguments in found] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_results_come_after_their_calls_and_the_answer_after_them(name: str) -> None:
    calls = [("look_up", ARGUMENTS)] if name == "llama3" else [("look_up", ARGUMENTS), ("now", {})]
    message = called(name, *calls)
    conversation = [{"role": "system", "content": "Be brief."}, QUESTION, message, *results(message)]
    text = render(name, conversation, asked(name))
    places = [text.index(f"result {index}") for index in range(len(calls))]
    assert [text.rindex("look_up"), *places] == sorted([text.rindex("look_up"), *places])
    for one, place in zip(message["tool_calls"], places):
        if name.startswith("mistral"):
            # They are told apart by ids.
            assert one["id"] in text[place - 60 : place + 60]
    if name == "llama3":
        assert '"result 0"' in text  # encoded once more
    again = [*conversation, {"role": "assistant", "content": "It is a gap."}, {"role": "user", "content": "Thanks"}]
    whole = render(name, again, asked(name))
    assert whole.index("It is a gap.") > whole.index("result 0")
    assert "Thanks" in whole


def test_results_of_one_turn_share_a_turn() -> None:
    for name in ("qwen2.5", "qwen3"):
        message = called(name, ("now", {}), ("now", {}))
        text = render(name, [QUESTION, message, *results(message)], asked(name))
        assert text.count("<|im_start|>user") == 2
        assert text.count("<tool_response>") == 2


def test_thoughts_of_earlier_turns_are_left_out() -> None:
    said = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nA gap."}
    text = render("qwen3", [QUESTION, said, {"role": "user", "content": "Thanks"}], asked("qwen3"))
    assert "A gap." in text
    assert "hmm" not in text


def test_what_a_template_refuses_is_a_wrong_request() -> None:
    twice = [QUESTION, QUESTION]
    with pytest.raises(InvalidOption, match="must take turns"):
        render("mistral", twice, asked("mistral"))
    foreign = {"id": "call_of_another_server", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    with pytest.raises(InvalidOption, match="9 letters and digits"):
        render("mistral", [QUESTION, {"role": "assistant", "tool_calls": [foreign]}], asked("mistral"))
    with pytest.raises(ApiError, match="is the id of no call"):
        render("qwen2.5", [QUESTION, {"role": "tool", "tool_call_id": "x", "content": "3"}], asked("qwen2.5"))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_must_come_begins_where_the_template_ends(name: str) -> None:
    tools = asked(name, tool_choice="required")
    text = render(name, [QUESTION], tools) + tools.opening
    ends = {"hermes": "<|im_start|>assistant\n", "llama3": "<|end_header_id|>\n\n"}
    assert text.endswith(ends.get(tools.style.name, "[/INST][TOOL_CALLS]"))
    assert tools.grammar is not None
