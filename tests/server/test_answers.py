"""The official client gets from the server what it gets from OpenAI's: whole answers, streams, samples and counts."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from jaxinfer import SamplingParams, __version__
from tests.late_imports import late
from tests.server.harness import MODEL, PROMPT, SECONDS, Running
from tests.toys import encode_bytes

openai = late("openai")

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 24}
MESSAGES: list[Any] = [{"role": "user", "content": "What did the fox do?"}]


@pytest.mark.slow
def test_a_completion_is_that_of_generate(server: Running) -> None:
    found = server.client().completions.create(model=MODEL, prompt=PROMPT, **SAMPLED)
    (expected,) = server.lm.generate(PROMPT, max_new_tokens=24, sampling=SamplingParams(temperature=0.9, seed=4))
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), len(expected.tokens))
    assert found.usage.total_tokens == len(PROMPT) + len(expected.tokens)
    assert found.system_fingerprint == f"jaxinfer-{__version__}-float32-{server.lm.fingerprint}"
    assert found.model == MODEL
    assert found.to_dict()["seed"] == 4


def test_a_chat_answer_is_that_of_chat(server: Running) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4)
    expected = server.lm.chat(MESSAGES, max_new_tokens=24, sampling=sampling)
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "What did "}, {"type": "text", "text": "the fox do?"}]}
    ]
    for messages, limit in ((MESSAGES, "max_tokens"), (parts, "max_completion_tokens")):
        found = server.client().chat.completions.create(
            model=MODEL, messages=messages, temperature=0.9, seed=4, **{limit: 24}
        )
        message = found.choices[0].message
        assert (message.role, message.content, message.refusal) == ("assistant", expected.text, None)
        assert found.choices[0].finish_reason == expected.finish_reason


def test_the_second_time_a_prompt_is_found_in_the_cache_and_drafts_are_counted(server: Running) -> None:
    request = {"prompt": "The old heron watched the moon. The old heron", "temperature": 0, "max_tokens": 40}
    first, second = (server.complete(**request).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    drafted = server.engine.submit(request["prompt"], max_new_tokens=40).result(SECONDS).from_draft
    accepted = second["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted == sum(drafted) > 0
    apart = server.complete(**request, cache_salt="another").json()
    assert apart["choices"] == second["choices"]
    assert apart["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# Each value of each field meets each of the others at least once.
VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3, "logprobs": True, "stop": ["e"]},
    {"n": 2, "return_token_ids": True, "return_drafts": True, "stop": ["he ", "x"]},
    {"logprobs": True, "return_token_ids": True, "return_drafts": True},
    {"stop": "fo", "repetition_penalty": 1.3, "min_p": 0.05, "top_k": 9},
    {"n": 2, "logit_bias": {"34": -100, "5": 2.5}, "frequency_penalty": 0.5, "presence_penalty": 0.5, "top_p": 0.9},
)


@pytest.mark.parametrize("fields", VARIED, ids=lambda fields: ",".join(fields) or "plain")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_joins_to_the_whole_answer(server: Running, path: str, fields: dict[str, Any]) -> None:
    is_chat = path == "/v1/chat/completions"
    request = {**SAMPLED, **fields, **({"messages": MESSAGES} if is_chat else {"prompt": PROMPT})}
    if not is_chat and "logprobs" in fields:
        request["logprobs"] = 0
    whole = server.post(path, {"model": MODEL, **request}).json()
    events = server.events(path, **request, stream_options={"include_usage": True})
    assert {event["id"] for event in events} == {events[0]["id"]}
    last = events.pop()
    assert last["choices"] == []
    without_cache = lambda usage: {key: value for key, value in usage.items() if key != "prompt_tokens_details"}  # noqa: E731
    assert without_cache(last["usage"]) == without_cache(whole["usage"])
    assert all(event["usage"] is None for event in events)
    assert len(whole["choices"]) == fields.get("n", 1)
    for index, choice in enumerate(whole["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        if is_chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": None}
            assert all(list(part["delta"]) == ["content"] for part in parts[1:-1])
            assert parts[-1]["delta"] == {}
            assert "".join(part["delta"]["content"] for part in parts[1:-1]) == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("token_ids", "prompt_token_ids"):
            joined = [token for part in parts for token in part.get(name, [])]
            assert joined == choice.get(name, [])
            assert bool(joined) == ("return_token_ids" in fields)
        for name in ("token_texts", "from_draft"):
            joined = [one for part in parts for one in part.get(name, [])]
            assert joined == choice.get(name, [])
            assert len(joined) == (len(choice["token_ids"]) if "return_drafts" in fields else 0)
        found = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        assert bool(found) == ("logprobs" in fields)
        for name in found[0] if found else ():
            if isinstance(choice["logprobs"][name], list):
                assert [one for each in found for one in each[name]] == choice["logprobs"][name]


def test_log_probabilities_are_those_of_the_drawn_tokens_whose_texts_join(server: Running) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4, logprobs=True, stop=["leaf"])
    (expected,) = server.lm.generate(PROMPT, max_new_tokens=60, sampling=sampling)
    request = {"temperature": 0.9, "seed": 4, "max_tokens": 60, "stop": "leaf"}
    (choice,) = server.complete(prompt=PROMPT, logprobs=0, **request).json()["choices"]
    logprobs = choice["logprobs"]
    assert tuple(logprobs["token_logprobs"]) == expected.logprobs
    assert "".join(logprobs["tokens"]) == choice["text"] == expected.text
    assert logprobs["text_offset"] == list(itertools.accumulate(map(len, logprobs["tokens"]), initial=0))[:-1]
    ids = encode_bytes(PROMPT)
    assert server.complete(prompt=ids, logprobs=0, **request).json()["choices"] == [choice]
    chat = server.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=9, logprobs=True, top_logprobs=0
    )
    entries = chat.choices[0].logprobs.content or []
    told = server.lm.chat(MESSAGES, max_new_tokens=9, sampling=SamplingParams(logprobs=True))
    assert tuple(entry.logprob for entry in entries) == told.logprobs
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == told.text


def test_a_character_is_never_cut_in_a_stream(server: Running) -> None:
    """Bytes of characters of two to four bytes are forced, each by its own token."""
    text = "é🙂"
    ids = encode_bytes(text)
    bias = {str(one): 100.0 for one in ids}
    for seed in range(4):
        request = {"prompt": text, "max_tokens": 40, "temperature": 1, "seed": seed, "logit_bias": bias}
        whole = server.complete(**request).json()["choices"][0]["text"]
        pieces = [event["choices"][0]["text"] for event in server.events("/v1/completions", **request)]
        assert "".join(pieces) == whole
        sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=dict.fromkeys(ids, 100.0))
        assert whole == server.lm.generate(text, max_new_tokens=40, sampling=sampling)[0].text
        assert any(ord(character) > 127 for character in whole)


def test_several_prompts_and_samples_come_in_order(server: Running) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4, n=2)
    prompts = [PROMPT, "A small", "One grey"]
    results = server.lm.generate(prompts, max_new_tokens=24, sampling=sampling, batch_size=1)
    expected = [result.text for result in results]
    for given in (prompts, [encode_bytes(prompt) for prompt in prompts]):
        found = server.complete(prompt=given, n=2, **SAMPLED).json()
        assert [choice["index"] for choice in found["choices"]] == list(range(6))
        assert [choice["text"] for choice in found["choices"]] == expected
        assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert expected[0] != expected[1]


def test_echo_puts_the_prompt_first(server: Running) -> None:
    alone = server.complete(prompt=PROMPT, **SAMPLED).json()["choices"][0]["text"]
    for given in (PROMPT, encode_bytes(PROMPT)):
        assert server.complete(prompt=given, echo=True, **SAMPLED).json()["choices"][0]["text"] == PROMPT + alone
        parts = server.events("/v1/completions", prompt=given, echo=True, **SAMPLED)
        assert "".join(part["choices"][0]["text"] for part in parts) == PROMPT + alone


def test_without_a_seed_answers_differ_and_the_seed_that_is_told_gives_them_again(server: Running) -> None:
    request = {"prompt": PROMPT, "temperature": 1.5, "max_tokens": 24}
    first, second = (server.complete(**request).json() for _ in range(2))
    assert first["choices"] != second["choices"]  # alike by chance less than once in a million times
    assert server.complete(**request, seed=first["seed"]).json()["choices"] == first["choices"]


def test_a_chat_without_a_limit_fills_the_context(server: Running) -> None:
    found = server.chat(messages=MESSAGES, ignore_eos=True).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] == server.lm.max_len


def test_the_async_client_streams_many_answers_at_once(server: Running) -> None:
    async def read(client: "openai.AsyncOpenAI", seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, temperature=0.9, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def read_all() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(read(client, seed) for seed in range(6)))

    found = asyncio.run(read_all())
    sampling = [SamplingParams(temperature=0.9, seed=seed) for seed in range(6)]
    prompts = [server.lm.encode_chat(MESSAGES)] * 6
    expected = server.lm.generate(prompts, max_new_tokens=24, sampling=sampling, batch_size=1)
    assert found == [result.text for result in expected]


def test_models_are_listed_and_described(server: Running) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "jaxinfer")
    assert client.models.retrieve(MODEL) == model
    assert model.to_dict()["max_model_len"] == server.lm.max_len
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


def test_texts_become_ids_and_texts_again(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": "Grüße 🙂"}).json()
    ids = server.lm.tokenizer.encode("Grüße 🙂")
    assert found == {"count": len(ids), "max_model_len": 200, "tokens": ids}
    assert server.post("/detokenize", {"tokens": ids, "model": MODEL}).json() == {"prompt": "Grüße 🙂"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == server.lm.encode_chat(MESSAGES)


@pytest.mark.slow
def test_answers_follow_the_schema_that_the_official_client_sends(server: Running) -> None:
    """Drafted or not, streamed or not, and beside answers without a schema."""
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}, "age": {"type": "boolean"}}}
    schema["required"] = ["kind", "age"]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}
    create = server.client().chat.completions.create
    messages: Any = [{"role": "user", "content": "hi"}]
    asked: Any = {"model": MODEL, "messages": messages, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    answer = create(**asked, response_format=wanted).choices[0]
    content = answer.message.content or ""
    assert answer.finish_reason == "stop"
    found = json.loads(content)
    assert list(found) == ["kind", "age"]
    assert found["kind"] in ("fox", "owl")
    assert isinstance(found["age"], bool)
    parts = create(**asked, response_format=wanted, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == content
    own = {"structured_outputs": {"regex": "(fox|owl)(, (fox|owl)){3}"}}
    text = create(**asked, extra_body=own).choices[0].message.content or ""
    assert set(text.split(", ")) <= {"fox", "owl"}
    assert len(text.split(", ")) == 4
