"""What is told of a text's tokens is what generation says of them, in every bit: prompts, answers and alternatives."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.server.api.alternatives import Alternative, Spelling, by_text, with_drawn
from jaxinfer.text_scores import score_text
from tests.server.harness import PROMPT, Running
from tests.toys import encode_bytes

IDS = encode_bytes(PROMPT)
# All texts here have up to 32 tokens: programs are made for one length.
NEW = 32 - len(IDS)
MESSAGES = [{"role": "user", "content": "hi"}]


def log_softmax(server: Running, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities of all tokens after each of a text's, [T, V], in float64."""
    logits_TV = np.asarray(server.lm.logits([ids]), np.float64)[0]
    shifted_TV = logits_TV - logits_TV.max(-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_scored_as_a_prompt_has_the_bits_that_it_was_drawn_with(server: Running, temperature: float) -> None:
    request = {"temperature": temperature, "seed": 4, "max_tokens": NEW, "return_token_ids": True, "ignore_eos": True}
    drawn = server.complete(prompt=IDS, logprobs=0, **request).json()["choices"][0]
    text = [*IDS, *drawn["token_ids"]]
    for most, number in itertools.product((0, 1), (0, 5)):
        given = text[: len(text) - most]
        found = server.complete(prompt=given, echo=True, logprobs=number, max_tokens=most, temperature=0).json()
        (choice,) = found["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][len(IDS) : len(given)] == drawn["logprobs"]["token_logprobs"][: NEW - most]
        assert len(logprobs["tokens"]) == len(given) + most
        assert choice["finish_reason"] == ("length" if not most else choice["finish_reason"])
        assert found["usage"]["completion_tokens"] == most
    assert score_text(server.lm, text).logprobs[len(IDS) - 1 :] == tuple(drawn["logprobs"]["token_logprobs"])


def test_alternatives_are_the_most_probable_tokens(server: Running) -> None:
    request = {"temperature": 1.0, "seed": 4, "max_tokens": NEW, "return_token_ids": True, "ignore_eos": True}
    (choice,) = server.complete(prompt=IDS, echo=True, logprobs=3, **request).json()["choices"]
    text, told = [*IDS, *choice["token_ids"]], choice["logprobs"]
    expected_TV = log_softmax(server, text)
    assert [told["token_logprobs"][0], told["top_logprobs"][0]] == [None, None]
    for place in range(1, len(text)):
        value, top = told["token_logprobs"][place], told["top_logprobs"][place]
        assert math.isclose(value, expected_TV[place - 1, text[place]], abs_tol=1e-4)
        best = np.sort(expected_TV[place - 1])[::-1][:3]
        assert np.allclose(list(top.values())[:3], best, atol=1e-4)
        assert value in top.values()
        # As evaluation harnesses ask whether a text is what the model would have written.
        is_greedy = value == max(top.values())
        assert is_greedy == (expected_TV[place - 1].argmax() == text[place])
        assert len(top) == 3 + (value < min(list(top.values())[:3]))
        if token_text := told["tokens"][place]:
            assert top[token_text] == value
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == list(itertools.accumulate(map(len, told["tokens"]), initial=0))[:-1]


def test_a_chat_has_up_to_twenty_alternatives(server: Running) -> None:
    answer = server.client().chat.completions.create(
        model="fable", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=20
    )
    entries: Any = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert entries
    for entry in entries:
        values = [one.logprob for one in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert (entry.top_logprobs[0].logprob, entry.top_logprobs[0].token) == (entry.logprob, entry.token)
        assert bytes(entry.top_logprobs[0].bytes or []).decode() == entry.token


def test_several_prompts_and_samples_are_scored_in_order(server: Running) -> None:
    other = encode_bytes("One grey")
    alone = [
        server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=0).json()["choices"][0]["logprobs"]
        for ids in (IDS, other)
    ]
    found = server.complete(prompt=[IDS, other], n=2, echo=True, logprobs=1, max_tokens=0).json()["choices"]
    assert [choice["logprobs"] for choice in found] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice["text"] for choice in found] == [PROMPT, PROMPT, "One grey", "One grey"]


def test_scoring_ends_in_time_and_refuses_what_is_too_much(server: Running) -> None:
    options, request = server.served.options, {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 0}
    server.served.options = replace(options, request_seconds=1e-9)
    try:
        late = server.complete(**request)
    finally:
        server.served.options = options
    assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timed_out")
    scorer = server.served.scorer
    scorer._waiting += scorer._most_waiting
    try:
        busy = server.complete(**request)
    finally:
        scorer._waiting -= scorer._most_waiting
    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "engine_busy")
    assert server.complete(**request).status_code == 200


def test_what_a_model_does_not_have_is_refused(server: Running) -> None:
    for ids, alternatives in (([], 0), ([9999], 0), ([5] * 500, 0), (IDS, 21), (IDS, -1)):
        with pytest.raises(InvalidOption):
            score_text(server.lm, ids, alternatives)
    assert score_text(server.lm, IDS[:1], 5).best == ()


def test_parts_of_characters_and_special_tokens_have_names(server: Running) -> None:
    spelling = Spelling(server.lm.tokenizer)
    first, _ = encode_bytes("é")
    assert spelling.alternative(first, -1.0) == Alternative(first, "bytes:\\xc3", b"\xc3", -1.0)
    assert spelling.alternative(0, -1.0) == Alternative(0, "<|end|>", b"<|end|>", -1.0)
    best = [Alternative(7, "a", b"a", -1.0), Alternative(8, "a", b"a", -2.0), Alternative(9, "", b"", -3.0)]
    assert by_text(best, 8, "a", -2.5) == {"token_id:7": -1.0, "a": -2.5, "token_id:9": -3.0}
    assert by_text(best, 5, "", -9.0) == {"a": -1.0, "token_id:8": -2.0, "token_id:9": -3.0, "token_id:5": -9.0}
    assert [one.logprob for one in with_drawn(best, 8, "a", -2.5)] == [-1.0, -2.5, -3.0]
