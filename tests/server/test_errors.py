"""Whatever a client sends or does, it gets an error that says what is wrong, and nobody else notices."""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from jaxinfer.errors import EngineBusy, EngineClosed, EngineError, InvalidOption, RequestCancelled, RequestTimedOut
from jaxinfer.server.api.errors import from_library
from jaxinfer.server.http.keys import hash_key, read_keys
from tests.late_imports import late
from tests.server.harness import LONG, MODEL, PROMPT, Running, http_request
from tests.toys import encode_bytes

openai = late("openai")

SHORT: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
# The official client takes fields that OpenAI has not by another way.
OWN = {"ignore_eos": LONG["ignore_eos"]}
NAMED: dict[str, Any] = {name: value for name, value in LONG.items() if name not in OWN}


@contextmanager
def told(server: Running, **options: Any) -> Iterator[None]:
    """Change options of the server for a while."""
    served = server.served
    before = served.options
    served.options = replace(before, **options)
    try:
        yield
    finally:
        served.options = before


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def send_raw(server: Running, data: bytes) -> bytes:
    """Send bytes, say that no more come, and return what comes back until the server closes."""
    with server.connect() as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def seconds_until_idle(server: Running, leave: Callable[[], None]) -> float:
    """Return the time from a client's leaving to the end of its request: the least of three, on a busy machine."""
    times = []
    for _ in range(3):
        before = server.engine.metrics().cancelled
        leave()
        times.append(server.until(lambda: server.is_idle))
        assert server.engine.metrics().cancelled > before
    return min(times)


def dribble(connection: socket.socket) -> None:
    """Send a byte now and then, for four seconds at most."""
    for _ in range(200):
        connection.sendall(b"x")
        time.sleep(0.02)


def fill(connection: socket.socket, data: bytes) -> None:
    """Send until the other side has enough."""
    while True:
        connection.sendall(data)


def test_the_clients_errors_are_those_of_openai(server: Running) -> None:
    client = server.client()
    ask = client.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=MODEL, messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(model=MODEL, messages=messages, reasoning_effort="low")
    assert (refused.value.param, refused.value.code) == ("reasoning_effort", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
        ask(model=MODEL, messages=messages, extra_body={"structured_outputs": {"regex": "(("}})


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/page.js/../../served.py", 404, "not_found"),
        ("GET", "/%00%ff", 404, "not_found"),
    ],
)
def test_wrong_paths_and_methods(server: Running, method: str, path: str, status: int, code: str) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_bodies_that_are_no_json_or_too_long(server: Running) -> None:
    path, limit = "/v1/completions", server.served.options.max_body_bytes
    kinds = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post(path, content=json.dumps(SHORT).encode(), headers=kinds).status_code == 200
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 9000):
        answer = server.http.post(path, content=content, headers=kinds)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    # What a form of another page's could send.
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.http.post(path, content=json.dumps(SHORT).encode(), headers={"content-type": kind})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
    big = json.dumps({**SHORT, "user": "x" * limit}).encode()
    for content in (big, iter([big[:9], big[9:]])):  # the second in chunks, without a length
        answer = server.http.post(path, content=content, headers=kinds)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    # Asked whether it may send, before it sends.
    asks = http_request(path, b"", length=limit + 1, more="Expect: 100-continue\r\n")
    assert send_raw(server, asks).startswith(b"HTTP/1.1 413")
    endless = http_request("/v1/completions", b"x" * (17 * limit), length=10**9)
    assert send_raw(server, endless).startswith(b"HTTP/1.1 413")


def test_no_body_makes_the_server_fail(server: Running) -> None:
    """300 requests whose values are replaced, and 100 whose bytes are, by a seeded chance."""
    rng = random.Random(0)
    odd = [
        None,
        True,
        -1,
        0,
        2**64,
        1e308,
        0.5,
        "",
        "x",
        "\ud800",
        "\x00",
        [],
        {},
        [[]],
        ["x"],
        {"x": 1},
        [1, 2],
        "e" * 300,
    ]
    known = {"prompt": PROMPT, "max_tokens": 2, "seed": 1, "n": 1, "stop": "x", "logit_bias": {"5": 1}, "priority": 1}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0.5, "stream": False}
    with httpx.Client(base_url=server.address, timeout=30.0, verify=False) as client:
        for number in range(300):
            path, base = rng.choice([("/v1/completions", known), ("/v1/chat/completions", chat)])
            body: dict[str, Any] = {"model": MODEL, **base}
            for name in rng.sample(sorted(body), rng.randint(1, 2)):
                body[name] = rng.choice(odd)
            if rng.random() < 0.2:
                path, body = (
                    rng.choice(["/tokenize", "/detokenize"]),
                    {rng.choice(["prompt", "tokens"]): rng.choice(odd)},
                )
            text = json.dumps(body)
            if number % 3 == 0:
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice('{}[]",:\\u0') + text[at + 1 :]
            answer = client.post(path, content=text.encode(), headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), (text, answer.text)
            if answer.status_code != 200:
                error_of(answer)


def test_no_bytes_make_the_server_fail(server: Running) -> None:
    rng = random.Random(1)
    whole = http_request("/v1/completions", json.dumps(SHORT).encode(), more="Connection: close\r\n")
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with server.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                first = answer.read().split(b"\r\n")[0]
        assert not first or int(first.split()[1]) < 500, bytes(data)
    assert server.complete(**SHORT).status_code == 200


def test_keys(server: Running, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# two\nsecret-1\n\nsha256:{hash_key('secret-2').hex()}\n")
    with told(server, keys=read_keys(["secret-3"], file)):
        for key in ("secret-1", "secret-2", "secret-3"):
            assert server.client(key).models.list().data
        for key in ("secret-4", f"sha256:{hash_key('secret-2').hex()}", "secret-", "clé".encode().decode("latin-1")):
            answer = server.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode("latin-1")})
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        for path in ("/v1/models", "/metrics", "/nowhere"):
            assert server.get(path).status_code == 401
        assert server.complete(**SHORT).headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/", "/page.js"):
            assert server.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words\n", "sha256:abc\n", "clé\n", "\x07\n"])
def test_wrong_key_files_are_refused(tmp_path: Any, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidOption):
        read_keys([], file)
    with pytest.raises(FileNotFoundError):
        read_keys([], tmp_path / "none")


def test_no_page_of_another_origin_is_let_in(server: Running) -> None:
    answer = httpx.options(
        f"{server.address}/v1/models", headers={"Origin": "http://x", "Access-Control-Request-Method": "GET"}
    )
    assert answer.status_code == 405
    for one in (answer, server.get("/v1/models", headers={"Origin": "http://x"})):
        assert not [name for name in one.headers if name.startswith("access-control")]


def test_names_that_a_stranger_lets_point_here_are_refused(server: Running) -> None:
    """A page whose own name resolves to this machine would be of the same origin."""
    for host in (
        "example.org",
        "example.org:8000",
        "127.0.0.1.example.org",
        "localhost.example.org",
        "10.0.0.1",
        "[::2]",
    ):
        answer = server.get("/v1/models", headers={"Host": host})
        assert (answer.status_code, error_of(answer)["code"]) == (403, "wrong_host")
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8000"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200
    for options in ({"is_local": False}, {"keys": read_keys(["secret"], None)}):
        with told(server, **options):
            headers = {"Host": "example.org", "Authorization": "Bearer secret"}
            assert server.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_who_leaves_ends_the_request_within_a_second(server: Running, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream, "n": 3}).encode()

    def leave() -> None:
        with server.connect() as connection:
            connection.sendall(http_request("/v1/completions", body))
            server.until(lambda: server.engine.metrics().running > 0)

    assert seconds_until_idle(server, leave) < 1.0


def test_the_official_client_leaves_and_nothing_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    def leave() -> None:
        stream = server.client().completions.create(**NAMED, n=3, stream=True, extra_body=OWN)
        next(iter(stream))
        stream.close()

    async def give_up() -> None:
        async with server.async_client() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.completions.create(**NAMED, n=10, extra_body=OWN)

    assert seconds_until_idle(server, leave) < 1.0
    assert seconds_until_idle(server, lambda: asyncio.run(give_up())) < 1.0
    assert not caplog.records


def test_too_many_requests_are_refused_until_there_is_room(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(http_request("/v1/completions", json.dumps({**LONG, "n": 40}).encode()))
        server.until(lambda: server.engine.metrics().waiting >= 30)
        answer = server.complete(**SHORT)
        assert (answer.status_code, error_of(answer)["code"]) == (429, "engine_busy")
        assert answer.headers["retry-after"] == "1"
        # Of several prompts, none runs.
        assert server.complete(**{**SHORT, "prompt": [PROMPT] * 3}).status_code == 429
    server.until(lambda: server.is_idle)
    assert server.complete(**SHORT).status_code == 200


def test_of_several_prompts_none_runs_when_one_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    submit = server.engine.submit

    def takes_two(*prompt: Any, **options: Any) -> Any:
        if len(taken) == 2:
            raise EngineBusy("the queue is full")
        taken.append(submit(*prompt, **options))
        return taken[-1]

    monkeypatch.setattr(server.engine, "submit", takes_two)
    assert server.complete(**{**LONG, "prompt": [PROMPT] * 3}).status_code == 429
    for request in taken:
        with pytest.raises(RequestCancelled):
            request.result(10.0)


def test_a_request_that_takes_too_long_ends(server: Running) -> None:
    with told(server, request_seconds=0.02):
        answer = server.complete(**{**LONG, "n": 4})
        assert (answer.status_code, error_of(answer)["code"]) == (504, "request_timed_out")
        lines = server.complete(**{**LONG, "n": 4}, stream=True).text.strip().split("\n\n")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_timed_out"


def test_a_request_that_fails_ends_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device fails on one prompt, while another request runs, which is computed anew."""
    device = server.engine._groups[0].core._device
    enter = device.enter

    def fails(slot: int, pages: Any, hidden: Any, entry: Any) -> Any:
        if list(entry.tokens) == encode_bytes("poison"):
            raise RuntimeError("no such thing")
        return enter(slot, pages, hidden, entry)

    expected = server.complete(**LONG).json()["choices"]
    monkeypatch.setattr(device, "enter", fails)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(server.complete(**LONG).json()["choices"]))
    other.start()
    server.until(lambda: server.engine.metrics().running > 0)
    answer = server.complete(**{**SHORT, "prompt": "poison"})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "engine_error")
    with pytest.raises(openai.APIError, match="no such thing"):
        list(server.client().completions.create(**{**SHORT, "prompt": "poison"}, stream=True))
    other.join()
    assert found == [expected]


def test_slow_clients_are_left(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol: Any = server.serving._server.config.http_protocol_class
    monkeypatch.setattr(protocol, "head_seconds", 0.3)
    for start in (b"", b"POST /v1/completions HTTP/1.1\r\nHost:"):
        began = time.monotonic()
        assert send_raw(server, start) == b""
        assert 0.05 < time.monotonic() - began < 5
    # More bytes of a head do not prolong the time.
    with server.connect() as connection, pytest.raises(ConnectionError):
        dribble(connection)
    with told(server, read_seconds=0.1):
        answer = send_raw(server, http_request("/v1/completions", b"{", length=100))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
    assert server.complete(**SHORT).status_code == 200


def test_clients_that_do_not_read_are_left(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests are sent on one connection, and no answer is read, until no more fit into the way."""
    protocol: Any = server.serving._server.config.http_protocol_class
    monkeypatch.setattr(protocol, "write_seconds", 0.2)
    ask = b"GET /page.js HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"
    connections = server.serving._server.server_state.connections
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1)
        port = connection.getsockname()[1]
        # A client whose window is shut may never see the reset, so the server's side is asked.
        with pytest.raises((ConnectionError, TimeoutError)):
            fill(connection, ask * 100)
        server.until(lambda: not any(each.client[1] == port for each in list(connections)), 5)
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineClosed("x"), 503),
        (RequestCancelled("x"), 503),
        (RequestTimedOut("x"), 504),
        (EngineError("x"), 500),
        (InvalidOption("x"), 400),
        (KeyError("x"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_library_have_a_status(error: Exception, status: int) -> None:
    assert from_library(error).status == status
