"""Every field of OpenAI's API is implemented or refused by its name, with what is wrong with it; so is every other."""

from typing import Any

import pytest

from jaxinfer.grammar import Grammar
from jaxinfer.server.api.chat import read_chat
from jaxinfer.server.api.completions import read_completion
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.sampling import Job, Limits
from jaxinfer.server.http.json_text import read_json, write_json
from tests.toys import encode_bytes

LIMITS = Limits("fable", 258, 60)
MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Bytes:
    """As much of a tokenizer as reading a request needs."""

    vocab_size, bos_token_id, eos_token_ids, chat_template = 258, None, (), None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return encode_bytes(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(one - 2 for one in ids).decode()


def read(kind: str, **fields: Any) -> Job:
    if kind == "chat":
        encode = lambda messages: encode_bytes("".join(f"{one['role']}: {one['content']}\n" for one in messages))  # noqa: E731
        return read_chat({"model": "fable", "messages": MESSAGES, **fields}, LIMITS, encode)
    tokenizer: Any = Bytes()
    return read_completion({"model": "fable", "prompt": "hi", **fields}, LIMITS, tokenizer)


# The fields that both must take: a value, and what becomes of it.
SHARED: dict[str, tuple[Any, str, Any]] = {
    "n": (3, "sampling.n", 3),
    "seed": (5, "sampling.seed", 5),
    "stop": ("x", "sampling.stop", ("x",)),
    "temperature": (0.5, "sampling.temperature", 0.5),
    "top_p": (0.5, "sampling.top_p", 0.5),
    "top_k": (7, "sampling.top_k", 7),
    "min_p": (0.5, "sampling.min_p", 0.5),
    "repetition_penalty": (2, "sampling.repetition_penalty", 2.0),
    "presence_penalty": (1, "sampling.presence_penalty", 1.0),
    "frequency_penalty": (-1, "sampling.frequency_penalty", -1.0),
    "logit_bias": ({"7": 1.5}, "sampling.logit_bias", ((7, 1.5),)),
    "max_tokens": (9, "max_tokens", 9),
    "min_tokens": (2, "sampling.min_new_tokens", 2),
    "ignore_eos": (True, "sampling.ignore_eos", True),
    "stream": (True, "stream", True),
    "priority": (-3, "priority", -3),
    "cache_salt": ("s", "cache_salt", "s"),
    "strategy": ("off", "drafts", False),
    "return_token_ids": (True, "return_token_ids", True),
    "user": ("someone", "priority", 0),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
        "sampling.grammar",
        Grammar.json_schema({"type": "integer"}),
    ),
    "structured_outputs": ({"choice": ["yes", "n.o"]}, "sampling.grammar", Grammar.regex("(yes)|(n\\.o)")),
}
TAKEN = {
    "completion": {
        **SHARED,
        "logprobs": (0, "sampling.logprobs", True),
        "echo": (True, "echoes", ("hi",)),
        "best_of": (1, "sampling.n", 1),
        "suffix": ("", "echoes", ()),
    },
    "chat": {
        **SHARED,
        "max_completion_tokens": (9, "max_tokens", 9),
        "logprobs": (True, "sampling.logprobs", True),
        "top_logprobs": (0, "sampling.logprobs", False),
        "response_format": ({"type": "text"}, "sampling.grammar", None),
        "tools": ([], "priority", 0),
        "tool_choice": ("none", "priority", 0),
        "store": (False, "priority", 0),
    },
}
REFUSED = {
    "completion": {"best_of": 2, "suffix": "end", "messages": MESSAGES, "max_completion_tokens": 5},
    "chat": {
        "functions": [{}],
        "function_call": "auto",
        "audio": {},
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "web_search_options": {},
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prompt_cache_key": "x",
        "prompt_cache_retention": "24h",
        "safety_identifier": "x",
        "echo": True,
        "suffix": "x",
        "prompt": "hi",
        "no_such_field": 1,
    },
}
# Wrong in both.
WRONG: tuple[tuple[str, Any], ...] = (
    ("n", 0), ("n", 129), ("n", 1.0), ("n", True), ("n", "1"), ("n", []),
    ("seed", -1), ("seed", 2**63), ("seed", 1.5), ("seed", 10**400),
    ("stop", 3), ("stop", [3]), ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", {}),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("temperature", 10**400),
    ("response_format", "json"), ("response_format", {}), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_object", "schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "{"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("structured_outputs", "a+"), ("structured_outputs", {}), ("structured_outputs", {"grammar": "root ::= x"}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"regex": 5}),
    ("top_p", 0), ("top_p", 1.1), ("top_p", "x"), ("top_k", -2), ("top_k", 0.5), ("top_k", 2**31),
    ("min_p", 1.1), ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"258": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "x"}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": 1, "01": 1}), ("logit_bias", {"²": 1}),
    ("logit_bias", {str(one): 0 for one in range(400)}),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", "5"),
    ("min_tokens", -1), ("ignore_eos", 1), ("stream", "yes"), ("stream", 1), ("echo", "x"), ("return_token_ids", 0),
    ("stream_options", {"include_usage": True}), ("stream_options", 3), ("user", 3), ("user", "x" * 513),
    ("priority", 0.5), ("priority", 2**31), ("cache_salt", 3), ("cache_salt", "x" * 257), ("model", 3),
    ("strategy", "medusa"), ("strategy", True),
)  # fmt: skip


def value_at(job: Job, path: str) -> Any:
    for name in path.split("."):
        job = getattr(job, name)
    return job


def error_of(kind: str, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    error = caught.value
    assert len(error.message) < 250
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize("kind", TAKEN)
def test_implemented_fields_arrive(kind: str) -> None:
    for name, (value, path, expected) in TAKEN[kind].items():
        assert value_at(read(kind, **{name: value}), path) == expected, name
        read(kind, **{name: None})


@pytest.mark.parametrize("kind", REFUSED)
def test_all_other_fields_are_refused_by_name(kind: str) -> None:
    for name, value in REFUSED[kind].items():
        error = error_of(kind, **{name: value})
        assert (error.status, error.param) == (400, name)
        assert name in error.message
        assert error.code in ("unsupported_parameter", "unsupported_value", "unknown_parameter")


@pytest.mark.parametrize("kind", TAKEN)
def test_wrong_values_are_refused_by_the_name_of_their_field(kind: str) -> None:
    for name, value in WRONG:
        error = error_of(kind, **{name: value})
        assert error.status == 400, name
        assert (error.param or "").split(".")[0] == name, (name, value)


@pytest.mark.parametrize("off", [0, -1])
def test_no_top_k_is_written_in_two_ways(off: int) -> None:
    assert read("chat", top_k=off).sampling.top_k == 0


def test_fields_that_need_or_exclude_others() -> None:
    json_object = {"response_format": {"type": "json_object"}}
    assert error_of("chat", **json_object, structured_outputs={"regex": "a"}).param == "structured_outputs"
    assert error_of("chat", **json_object, ignore_eos=True).param == "ignore_eos"
    assert error_of("completion", **json_object, min_tokens=3).param == "min_tokens"
    assert error_of("completion", max_tokens=0).param == "max_tokens"
    assert error_of("chat", top_logprobs=2).param == "top_logprobs"
    for kind, scored in (
        ("completion", {"logprobs": 1}),
        ("completion", {"echo": True, "logprobs": 0}),
        ("chat", {"logprobs": True, "top_logprobs": 1}),
    ):
        assert error_of(kind, **scored, stream=True).param == "stream"
    assert error_of("chat", max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    assert read("chat", max_tokens=3, max_completion_tokens=3).max_tokens == 3
    options = {"include_usage": True, "x": 1}
    assert error_of("chat", stream=True, stream_options=options).param == "stream_options.x"
    assert read("chat", stream=True, stream_options={"include_usage": True}).include_usage
    assert error_of("chat", n=3, model=None).code == "missing_required_parameter"
    assert (error_of("chat", model="gpt").status, error_of("chat", model="gpt").code) == (404, "model_not_found")


def test_alternatives_up_to_the_most_are_taken() -> None:
    """Five for completions and twenty for chats, as OpenAI has it."""
    assert [read("completion", logprobs=number).top_logprobs for number in (0, 5)] == [0, 5]
    assert read("chat", logprobs=True, top_logprobs=20).top_logprobs == 20
    for number in (6, -1, True, 1.0, "1"):
        assert error_of("completion", logprobs=number).param == "logprobs"
    for number in (21, -1, True, 1.0, "1"):
        assert error_of("chat", logprobs=True, top_logprobs=number).param == "top_logprobs"
    job = read("completion", echo=True, logprobs=0, max_tokens=0)
    assert (job.is_scored, job.max_tokens, job.new_tokens(job.prompts[0], 60)) == (True, 0, 0)
    assert not read("completion", echo=True).is_scored
    assert read("completion", echo=True, max_tokens=0, prompt=[5] * 60).max_tokens == 0


def test_prompts_are_texts_ids_or_lists_of_either() -> None:
    ids = tuple(encode_bytes("hi"))
    for prompt in ("hi", list(ids), ["hi"], [list(ids)]):
        assert read("completion", prompt=prompt).prompts == (ids,)
    assert read("completion", prompt=["hi", list(ids)]).prompts == (ids, ids)
    for prompt in (3, [], [[]], [3, "x"], [[3], 3], [True], [1.5], {}, "", [""], [-1], [258], [2**70]):
        assert error_of("completion", prompt=prompt).param == "prompt"
    assert error_of("completion", prompt=["hi"] * 50, n=3).param == "prompt"


def test_prompts_that_leave_no_room_are_too_long() -> None:
    assert read("completion", prompt=[5] * 50, max_tokens=10).max_tokens == 10
    for fields in ({"prompt": [5] * 51, "max_tokens": 10}, {"prompt": [5] * 60, "max_tokens": 1}):
        assert error_of("completion", **fields).code == "context_length_exceeded"
    # With "user: " and the end of the line.
    assert len(read("chat", messages=[{"role": "user", "content": "x" * 52}]).prompts[0]) == 59
    assert error_of("chat", messages=[{"role": "user", "content": "x" * 53}]).code == "context_length_exceeded"
    job = read("chat")
    assert len(job.prompts[0]) + job.new_tokens(job.prompts[0], LIMITS.longest_text) == LIMITS.longest_text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (3, "messages"),
        ([], "messages"),
        ([3], "messages[0]"),
        ([*MESSAGES, {"content": "x"}], "messages[1].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": [], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "messages[0].content[0].y"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "function": 3}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
    ],
)
def test_wrong_messages_are_named_by_their_place(messages: Any, param: str) -> None:
    assert error_of("chat", messages=messages).param == param


def test_an_answer_of_the_client_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert read("chat", messages=[{"role": "developer", "content": "d"}, *MESSAGES, answer]).prompts[0] == tuple(
        encode_bytes("system: d\nuser: hi\nassistant: x\n")
    )


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"3", b"null", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1, "a": 2}', b"\xff\xfe",
        b'{"a": "\xff"}',
        b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b'{"a": ' + b"1" * 10_000 + b"}", b"{'a': 1}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not valid JSON") as caught:
        read_json(text)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_number_of_thousands_of_digits_is_refused_in_our_words() -> None:
    with pytest.raises(ApiError, match=r"a number of 5,000 digits is too long$"):
        read_json(b'{"max_tokens": ' + b"1" * 5_000 + b"}")


def test_half_a_pair_of_surrogates_comes_back_as_it_came() -> None:
    value = read_json(b'{"a": "\\ud800 \xc3\xa9"}')
    assert read_json(write_json(value)) == value
