"""A client that has had its requests or tokens of a minute waits as long as it is told; others do not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxinfer.server.http.keys import read_keys
from jaxinfer.server.http.rates import Rates
from tests.server.harness import LONG, PROMPT, Running, http_request


class Clock:
    """Time that a test moves on."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(server: Running, clock: Clock) -> Iterator[Running]:
    """The shared server with two keys, each with three requests and 40 tokens a minute."""
    options, rates = server.served.options, server.served.rates
    server.served.options = replace(options, keys=read_keys(["one", "two"], None))
    server.served.rates = Rates(3, 40, clock)
    yield server
    server.until(lambda: server.is_idle)
    server.served.options, server.served.rates = options, rates


def ask(server: Running, key: str, tokens: int = 1) -> tuple[int, str | None]:
    """Return the status of a request, and what it says of trying again."""
    body = {"model": LONG["model"], "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    if answer.status_code == 429:
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    return answer.status_code, answer.headers.get("retry-after")


def test_each_key_has_its_own_requests(limited: Running, clock: Clock) -> None:
    assert [ask(limited, "one") for _ in range(4)] == [(200, None)] * 3 + [(429, "20")]
    assert ask(limited, "two") == (200, None)
    headers = {"Authorization": "Bearer one"}
    assert limited.get("/v1/models", headers=headers).status_code == 200
    assert limited.post("/tokenize", {"prompt": "x"}, headers=headers).status_code == 200
    clock.now += 19.9
    assert ask(limited, "one") == (429, "1")
    clock.now += 0.2
    assert ask(limited, "one") == (200, None)
    clock.now += 1000.0
    assert [ask(limited, "one")[0] for _ in range(4)] == [200] * 3 + [429]


def test_tokens_of_prompts_and_answers_are_counted(limited: Running, clock: Clock) -> None:
    limited.served.rates = Rates(None, 40, clock)
    used = len(PROMPT) + 50
    assert ask(limited, "one", 50) == (200, None)
    limited.until(lambda: limited.is_idle)
    seconds = (used - 40) * 60 / 40
    assert ask(limited, "one") == (429, str(round(seconds + 0.5)))
    clock.now += seconds - 0.1
    assert ask(limited, "one")[0] == 429
    clock.now += 0.2
    assert ask(limited, "one")[0] == 200


def test_responses_are_counted_as_all_answers_are(limited: Running, clock: Clock) -> None:
    body, headers = {"model": LONG["model"], "input": "hi"}, {"Authorization": "Bearer one"}
    limited.served.rates = Rates(2, 1000, clock)
    for stream in (False, True):
        found = limited.post("/v1/responses", {**body, "max_output_tokens": 5, "stream": stream}, headers=headers)
        assert found.status_code == 200
    refused = limited.post("/v1/responses", body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    limited.until(lambda: limited.is_idle)
    usage = limited.served.rates._left["tokens", limited.served.options.keys.client("Bearer one")]
    prompt = len(limited.lm.encode_chat([{"role": "user", "content": "hi"}]))
    assert 2 * prompt < 1000 - usage._left <= 2 * (prompt + 5)


def test_a_stream_that_is_left_counts_what_it_has_given(limited: Running, clock: Clock) -> None:
    limited.served.rates = Rates(None, 1000, clock)
    request = {**LONG, "stream": True}
    headers = {"Authorization": "Bearer one"}
    with limited.http.stream("POST", "/v1/completions", json=request, headers=headers) as answer:
        next(answer.iter_bytes())
    limited.until(lambda: limited.is_idle)
    (allowance,) = limited.served.rates._left.values()
    assert len(PROMPT) < 1000 - allowance._left <= len(PROMPT) + LONG["max_tokens"]


def test_without_keys_all_share_the_limits_and_without_limits_nobody_waits(clock: Clock) -> None:
    rates = Rates(2, None, clock)
    assert [rates.admit("") is None for _ in range(3)] == [True, True, False]
    free = Rates(clock=clock)
    assert all(free.admit("") is None for _ in range(1000))
    assert not free._left


def test_a_body_that_is_not_read_is_not_taken_for_a_request(limited: Running) -> None:
    """The connection is closed: what comes after a refused head is a body."""
    for _ in range(3):
        ask(limited, "one")
    with limited.connect() as connection:
        connection.sendall(http_request("/v1/completions", b"{}", more="Authorization: Bearer one\r\n"))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 429")
    assert answer.count(b"HTTP/1.1") == 1
