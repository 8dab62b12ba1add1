"""The official client gets responses in items and their events in order; what is not implemented is refused by name."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer import SamplingParams
from jaxinfer.grammar import Grammar
from jaxinfer.results import StreamPiece
from jaxinfer.server.api.choices import Choice, new_head
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.fields import Fields
from jaxinfer.server.api.response_form import ResponseForm
from jaxinfer.server.api.response_input import read_input
from jaxinfer.server.api.responses import read_response
from jaxinfer.server.api.sampling import Job, Limits
from jaxinfer.server.api.tools import Calling, calling_of, take_tools
from jaxinfer.server.tools.formats import BY_NAME
from jaxinfer.tokenizers import ChatTemplate
from tests.late_imports import late
from tests.server.harness import MODEL, SECONDS, Running
from tests.server.test_tools import NUMBER, TEMPLATE
from tests.toys import encode_bytes

openai = late("openai")

ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0.9, "max_output_tokens": 24, "extra_body": {"seed": 4}}
CONVERSATION: Any = [{"role": "user", "content": "What did the fox do?"}]
TOOLS: Any = [
    {"type": "function", "name": "ox", "parameters": NUMBER, "strict": True},
    {"type": "function", "name": "owl", "description": "Finds an owl.", "parameters": None, "strict": True},
]
CALLING = Calling(BY_NAME["hermes"])


@pytest.fixture
def client(server: Running) -> Iterator["openai.OpenAI"]:
    with server.client() as client:
        yield client


def test_a_response_is_the_answer_of_the_model(server: Running, client: "openai.OpenAI") -> None:
    for given, messages in (
        ({"input": CONVERSATION[0]["content"]}, CONVERSATION),
        (
            {"input": CONVERSATION, "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, *CONVERSATION],
        ),
    ):
        found = client.responses.create(**ASKED, **given)
        sampling = SamplingParams(temperature=0.9, seed=4)
        ids = server.lm.encode_chat(messages)
        expected = server.engine.submit(ids, max_new_tokens=24, sampling=sampling).result(SECONDS)
        assert found.output_text == expected.text
        (item,) = found.output
        assert (item.type, item.role) == ("message", "assistant")
        ends = {"stop": ("completed", None), "length": ("incomplete", "max_output_tokens")}[expected.finish_reason]
        assert (found.status, found.incomplete_details and found.incomplete_details.reason) == ends
        assert item.status == ends[0]
        assert found.usage is not None
        assert (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), len(expected.tokens))
        assert found.usage.total_tokens == len(ids) + len(expected.tokens)
        assert (found.instructions, found.max_output_tokens) == (given.get("instructions"), 24)
        assert (found.store, found.error, found.to_dict()["seed"]) == (False, None, 4)


def test_a_stream_has_the_events_of_the_api_and_joins_to_the_whole(client: "openai.OpenAI") -> None:
    whole = client.responses.create(**ASKED, input=CONVERSATION)
    events = list(client.responses.create(**ASKED, input=CONVERSATION, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind, _ in itertools.groupby(event.type for event in events)] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{whole.status}",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert (first.response.status, first.response.output, first.response.usage) == ("in_progress", [], None)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    (item,) = last.response.output
    assert {event.item_id for event in events if event.type == "response.output_text.delta"} == {item.id}
    with client.responses.stream(**ASKED, input=CONVERSATION) as stream:
        assert stream.until_done().get_final_response().output_text == whole.output_text


@pytest.mark.exhaustive
def test_a_response_follows_its_schema(client: "openai.OpenAI") -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}, "age": {"type": "boolean"}}}
    text: Any = {"format": {"type": "json_schema", "name": "animal", "schema": {**schema, "required": ["kind", "age"]}}}
    found = client.responses.create(**{**ASKED, "max_output_tokens": 60}, input="hi", text=text)
    assert set(json.loads(found.output_text)) == {"kind", "age"}
    assert found.status == "completed"
    assert found.to_dict()["text"] == text


def test_functions_are_called_and_their_results_read(
    server: Running, client: "openai.OpenAI", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.served.calling.style is None
    tokenizer: Any = server.lm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", ChatTemplate(TEMPLATE))
    monkeypatch.setattr(server.served, "calling", calling_of(tokenizer, "auto"))
    create = client.responses.create
    asked: Any = {**ASKED, "max_output_tokens": 100, "tools": TOOLS, "parallel_tool_calls": False, "input": "hi"}
    answer = create(**asked, tool_choice={"type": "function", "name": "ox"})
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("ox", "completed")
    assert json.loads(call.arguments)["n"] in ("a", "b")
    events = list(create(**asked, tool_choice={"type": "function", "name": "ox"}, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert len(pieces) > 1
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    again = create(**{**asked, "input": [*CONVERSATION, call.to_dict(), result]})
    number = json.loads(call.arguments)["n"]
    text = f"[ox][owl]user: What did the fox do?\nassistant: ox{number}\ntool: 3\nassistant: "
    assert again.usage is not None
    assert again.usage.input_tokens == len(encode_bytes(text))


def test_text_and_calls_are_items_of_their_own() -> None:
    """One after the other, each closed before the next; at once and as a stream alike."""
    texts = [*"So. ", '<tool_call>{"name": "owl", "arguments": {}}', "</tool_call>\n", "And ", '<tool_call>{"name": "f']
    tools = take_tools(Fields({"tools": TOOLS}), CALLING, is_flat=True)
    job, head, choice = (
        Job(((1,),), SamplingParams(), None, tools=tools),
        new_head("resp", "m", "f", 0),
        Choice(0, (1,)),
    )
    form, events = ResponseForm(head, job), []
    for text in texts:
        piece = StreamPiece(text, (5,), (text,))
        events += form.delta(choice, choice.take(piece), piece)
    events += form.last(choice)
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    usage = {name: {} for name in ("prompt_tokens_details", "completion_tokens_details")}
    usage |= dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
    whole = ResponseForm(head, job).whole([choice], usage)["output"]
    told = [(one["type"], one.get("arguments", "") or one["content"][0]["text"]) for one in closed]
    assert told == [("message", "So."), ("function_call", "{}"), ("message", 'And <tool_call>{"name": "f')]
    assert [{**one, "id": "", "call_id": ""} for one in whole] == [{**one, "id": "", "call_id": ""} for one in closed]
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_a_stream_that_fails_says_why(client: "openai.OpenAI", monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("nobody should read this")

    monkeypatch.setattr(ResponseForm, "last", fail)
    *_, last = client.responses.create(**ASKED, input=CONVERSATION, stream=True)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error and last.response.error.code) == ("failed", "server_error")
    assert "nobody" not in last.to_json()


def read(**fields: Any) -> Job:
    encode = lambda messages, **_: encode_bytes("".join(f"{one['role']}: {one['content']}\n" for one in messages))  # noqa: E731
    return read_response({"model": "fable", "input": "hi", **fields}, Limits("fable", 258, 90), encode, CALLING)


def test_fields_arrive() -> None:
    job = read(instructions="x", max_output_tokens=9, temperature=0.5, top_p=0.5, seed=3, stop="y", priority=2)
    assert job.prompts == (tuple(encode_bytes("system: x\nuser: hi\n")),)
    sampling = job.sampling
    assert (job.max_tokens, job.priority, sampling.temperature, sampling.top_p) == (9, 2, 0.5, 0.5)
    assert (sampling.seed, sampling.stop) == (3, ("y",))
    assert [read(strategy=name).drafts for name in ("off", "on", None)] == [False, True, True]
    assert read(text={"format": {"type": "json_object"}}).sampling.grammar == Grammar.json_object()
    harmless = {"store": False, "background": False, "truncation": "disabled", "include": [], "metadata": {}}
    assert read(**harmless, text={"format": {"type": "text"}}, tools=[], tool_choice="auto").sampling.grammar is None
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = {"type": "message", "id": "1", "status": "completed", "role": "assistant"}
    answer["content"] = [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]
    job = read(input=[{"role": "developer", "content": parts}, answer])
    assert job.prompts == (tuple(encode_bytes("system: ab\nassistant: c\n")),)
    calls = [{"type": "function_call", "call_id": one, "name": "f", "arguments": "{}"} for one in "12"]
    (said, result) = read_input([*calls, {"type": "function_call_output", "call_id": "2", "output": "x"}], "")
    assert [one["id"] for one in said["tool_calls"]] == ["1", "2"]
    assert (result["role"], result["name"], result["tool_call_id"]) == ("tool", "f", "2")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: value}, name) for name, value in {
            "previous_response_id": "resp_1", "store": True, "background": True, "conversation": "x",
            "prompt": {"id": "x"}, "truncation": "auto", "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"}, "top_logprobs": 2,
            "reasoning": {"effort": "low"}, "max_tool_calls": 3, "n": 2, "response_format": {"type": "text"},
            "max_tokens": 5, "messages": [], "service_tier": "flex", "prompt_cache_key": "x", "moderation": {},
            "return_token_ids": True, "no_such_field": 1, "input": 3, "instructions": 3, "max_output_tokens": 0,
            "strategy": "never",
        }.items()),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input[0].y"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": 3, "call_id": "1"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id"),
        ({"text": 3}, "text"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": "{"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS}, "text.format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": "x" * 99}, "input"),
    ],
)  # fmt: skip
def test_what_nothing_here_can_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
    assert "\n" not in caught.value.message


def test_the_client_is_told_what_is_refused(client: "openai.OpenAI") -> None:
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(**ASKED, input="hi", previous_response_id="resp_1")
