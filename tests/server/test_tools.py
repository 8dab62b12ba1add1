"""Clients name functions, and get calls of them as OpenAI's API has them: at once or as a stream, drawn or enforced."""

import json
from typing import Any

import pytest

from jaxinfer import GenerationResult, GenerationStats, SamplingParams, StreamPiece
from jaxinfer.errors import InvalidOption
from jaxinfer.server.api.chat import ChatForm
from jaxinfer.server.api.choices import Choice, new_head
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.fields import Fields
from jaxinfer.server.api.messages import read_messages
from jaxinfer.server.api.sampling import Job
from jaxinfer.server.api.tools import Calling, ToolUse, calling_of, take_tools
from jaxinfer.server.tools.formats import BY_NAME
from jaxinfer.text_scores import score_text
from jaxinfer.tokenizers import ChatTemplate
from tests.server.harness import MODEL, SECONDS, Running
from tests.toys import encode_bytes

TEMPLATE = (
    '{# <|start_header_id|> "parameters": #}'
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.n }}{% endfor %}{{ '\\n' }}{% endfor %}assistant: "
)
# So small that grammars of these tools are no larger than those of other tests, whose programs they share.
NUMBER = {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "ox", "description": "Finds an ox.", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "owl", "strict": True}},
]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "temperature": 1.0, "max_tokens": 120}


@pytest.fixture
def calls(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The shared server, its model's template knowing tools."""
    tokenizer: Any = server.lm.tokenizer
    assert server.served.calling.style is None
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(TEMPLATE))
    monkeypatch.setattr(server.served, "calling", calling_of(tokenizer, "auto"))
    return server


def use(form: str = "llama3", hidden: dict[int, str] | None = None, **fields: Any) -> ToolUse:
    found = take_tools(Fields({"tools": TOOLS, **fields}), Calling(BY_NAME[form], hidden or {}))
    assert found is not None
    return found


@pytest.mark.slow
def test_a_call_that_must_come_follows_its_schema(calls: Running) -> None:
    create = calls.client().chat.completions.create
    asked: Any = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    # After the "o" of both names.
    (w,) = encode_bytes("w")
    for name, bias in (("owl", 100), ("ox", -100)):
        choice = create(**asked, logit_bias={str(w): bias}).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.function.name == name
        assert json.loads(call.function.arguments) in ([{"n": "a"}, {"n": "b"}] if name == "ox" else [{}])


@pytest.mark.slow
def test_a_named_function_is_called_as_its_grammar_and_the_seed_say(calls: Running) -> None:
    asked = {"tool_choice": {"type": "function", "function": {"name": "ox"}}, "parallel_tool_calls": False}
    answer = calls.chat(**{**ASKED, **asked}, seed=3, return_token_ids=True).json()["choices"][0]
    tools = use(**asked)
    ids = calls.lm.encode_chat(MESSAGES, tools=tools.shown)
    assert ids == calls.lm.tokenizer.encode("[ox][owl]user: hi\nassistant: ", add_special_tokens=False)
    sampling = SamplingParams(temperature=1.0, seed=3, grammar=tools.grammar)
    expected = calls.engine.submit(ids, max_new_tokens=120, sampling=sampling).result(SECONDS)
    assert answer["token_ids"] == list(expected.tokens)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "ox"
    arguments = call["function"]["arguments"]
    assert expected.text == f'{{"name": "ox", "parameters": {arguments}}}'


def test_a_stream_of_calls_joins_to_the_whole_answer(calls: Running) -> None:
    asked = {**ASKED, "tool_choice": "required", "seed": 1, "n": 2}
    whole = calls.post("/v1/chat/completions", asked).json()
    events = calls.events("/v1/chat/completions", **asked, stream_options={"include_usage": True})
    assert events.pop()["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in parts[-2:]] == [None, choice["finish_reason"]]
        assert_joined(choice["message"], [part["delta"] for part in parts])
    assert len({call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]}) > 1


def assert_joined(message: dict[str, Any], deltas: list[dict[str, Any]]) -> None:
    """Check deltas against a message: a call's first one names it, the others have pieces of its arguments."""
    made: list[dict[str, Any]] = []
    for one in [call for delta in deltas for call in delta.get("tool_calls", [])]:
        if one["index"] == len(made):
            assert (one["type"], one["function"]["arguments"]) == ("function", "")
            made.append(one)
        else:
            assert one == {"index": len(made) - 1, "function": {"arguments": one["function"]["arguments"]}}
            made[-1]["function"]["arguments"] += one["function"]["arguments"]
    without_ids = lambda found: [(one["type"], one["function"]) for one in found]  # noqa: E731
    assert without_ids(made) == without_ids(message.get("tool_calls", []))
    assert len({one["id"] for one in made}) == len(made)
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "several"), [("hermes", True), ("hermes", False), ("mistral", True)])
def test_calls_are_found_in_what_a_model_draws(form: str, several: bool, size: int) -> None:
    """The mark of the second format is a token without text."""
    if form == "hermes":
        texts = [*"Well.\n", '<tool_call>{"name": "ow', 'l", "arguments": {}}', "</tool_call>\n<tool_", "call>"]
        texts += ['{"name": "ox", ', '"arguments": {"n": "b"}}</tool_call>']
    else:
        texts = [
            *"Well.\n",
            "",
            ' [{"name": "owl", "argu',
            'ments": {}}, {"name": "ox", "arguments": {"n": ',
            '"b"}}]',
        ]
    tokens = [9 if not text else 5 for text in texts]
    tools = use(form, {9: "[TOOL_CALLS]"}, parallel_tool_calls=several)
    job = Job(((1,),), SamplingParams(logprobs=True), None, tools=tools)
    form_of_answer, choice = ChatForm(new_head("x", "m", "f", 0), job), Choice(0, (1,))
    stats = GenerationStats(1, 1, 1, 1.0, 1.0, 0, 0, (), 0.0, 0.0, 0.0, 0.0, 0)
    chunks = []
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        piece = StreamPiece(
            "".join(part), tuple(tokens[start : start + size]), tuple(part), logprobs=(-1.0,) * len(part)
        )
        chunks += form_of_answer.delta(choice, choice.take(piece), piece)
    choice.take(StreamPiece("", result=GenerationResult(None, choice.text, (), (), "stop", stats)))
    chunks += form_of_answer.last(choice)
    whole = form_of_answer.whole([choice], {})["choices"][0]
    message = whole["message"]
    assert message["content"] == "Well."
    found = [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    assert found == [("owl", "{}"), ("ox", '{"n": "b"}')][: 2 if several else 1]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert_joined(message, [part["delta"] for part in parts])
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
    logprobs = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [one["token"] for one in logprobs] == texts


def test_calls_come_with_alternatives_that_are_of_the_raw_logits(calls: Running) -> None:
    asked = {**ASKED, "tool_choice": "required", "seed": 1, "return_token_ids": True}
    plain = calls.chat(**asked, logprobs=True).json()["choices"][0]
    found = calls.chat(**asked, logprobs=True, top_logprobs=2).json()["choices"][0]
    told = found["logprobs"]["content"]
    assert len(told) == len(found["token_ids"]) > 0
    assert found["message"]["tool_calls"][0]["function"] == plain["message"]["tool_calls"][0]["function"]
    assert [{**one, "top_logprobs": []} for one in told] == plain["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in told] == [2] * len(told)
    scores = score_text(calls.lm, [*found["prompt_token_ids"], *found["token_ids"]], 2)
    start = len(found["prompt_token_ids"]) - 1
    assert [one["logprob"] for one in told] == list(scores.logprobs[start:])
    best = [[value for _, value in each] for each in scores.best[start:]]
    assert [[one["logprob"] for one in each["top_logprobs"]] for each in told] == best


def test_without_a_call_an_answer_is_text(calls: Running) -> None:
    asked = {**ASKED, "seed": 2, "max_tokens": 20}
    for more in ({}, {"tool_choice": "auto", "parallel_tool_calls": True}):
        found = calls.chat(**{**asked, **more}).json()["choices"][0]
        ids = calls.lm.encode_chat(MESSAGES, tools=use().shown)
        sampling = SamplingParams(temperature=1.0, seed=2)
        expected = calls.engine.submit(ids, max_new_tokens=20, sampling=sampling).result(SECONDS)
        assert found["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert found["finish_reason"] == expected.finish_reason


def test_a_call_that_is_cut_off_says_so(calls: Running) -> None:
    asked = {
        **ASKED,
        "tool_choice": {"type": "function", "function": {"name": "ox"}},
        "max_tokens": 36,
        "parallel_tool_calls": False,
    }
    found = calls.chat(**asked, seed=1).json()["choices"][0]
    assert found["finish_reason"] == "length"
    arguments = found["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments.startswith("{")
    assert "}" not in arguments


def test_calls_and_their_results_are_sent_back(calls: Running) -> None:
    client = calls.client()
    answer = client.chat.completions.create(**ASKED, seed=0, tool_choice="required", parallel_tool_calls=False)
    message: Any = answer.choices[0].message
    (call,) = message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    conversation = [*MESSAGES, message.to_dict(), result]
    told = calls.post("/tokenize", {"messages": conversation, "tools": TOOLS}).json()["tokens"]
    number = json.loads(call.function.arguments).get("n", "")
    text = f"[ox][owl]user: hi\nassistant: {call.function.name}{number}\ntool: 3\nassistant: "
    assert calls.lm.tokenizer.decode(told) == text
    again = client.chat.completions.create(**{**ASKED, "messages": conversation, "max_tokens": 5, "seed": 1})
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(told)


def test_what_a_template_does_not_know_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = server.chat(messages=MESSAGES, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "start with --tool-format" in answer.json()["error"]["message"]
    monkeypatch.setattr(server.served, "calling", Calling(BY_NAME["llama3"]))
    answer = server.chat(messages=MESSAGES, tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert "does not know tools" in answer.json()["error"]["message"]
    assert server.chat(messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "ox", "arguments": "{}"}}
    conversation = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    answer = server.chat(messages=conversation, max_tokens=1)
    assert "message 1: this model's chat template does not know calls of tools" in answer.json()["error"]["message"]
    with pytest.raises(InvalidOption, match="the results of tools"):
        ChatTemplate("{{ messages }}").render([{"role": "tool", "content": "x"}])


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": 3}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
        (function(), "tools[0].function.name"),
        (function(name="a b"), "tools[0].function.name"),
        (function(name="f" * 65), "tools[0].function.name"),
        (function(name="f", x=1), "tools[0].function.x"),
        (function(name="f", strict=1), "tools[0].function.strict"),
        (function(name="f", description=1), "tools[0].function.description"),
        (function(name="f", parameters=[]), "tools[0].function.parameters"),
        (function(name="f", parameters={"type": "string"}), "tools[0].function.parameters"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ox", "x": 1}}},
         "tool_choice.function.x"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named_by_their_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        take_tools(Fields(fields), Calling(BY_NAME["hermes"]))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "\n" not in caught.value.message


def test_templates_get_tools_and_calls_as_they_want_them() -> None:
    """A function without a schema has no arguments; arguments are objects; a result names its function."""
    (ox, owl) = use().shown
    assert ox == TOOLS[0]
    assert owl["function"]["parameters"] == {"type": "object", "properties": {}}
    call = {"id": "1", "type": "function", "function": {"name": "ox", "arguments": '{"n": "b"}'}, "index": 0}
    results = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    calls, result = read_messages(results, "messages")
    assert calls["tool_calls"][0]["function"] == {"name": "ox", "arguments": {"n": "b"}}
    assert result == {"role": "tool", "content": "x", "tool_call_id": "1", "name": "ox"}
    assert use("mistral", tool_choice="required").opening == "[TOOL_CALLS]"
    assert use("mistral").opening == ""
