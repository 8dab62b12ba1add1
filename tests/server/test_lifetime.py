"""A server starts with one line, ends itself after what runs, and its mistakes are one line and exit code 2."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.server.options import ServerOptions
from jaxinfer.server.served import Served
from jaxinfer.server.serving import Serving, listen
from tests.cli.conftest import Outcome, run  # noqa: F401 - a fixture
from tests.server.harness import ENGINE, LONG, SECONDS, STRATEGY

ROOT = Path(__file__).resolve().parents[2]
NAME = "model"
STREAM = {**LONG, "model": NAME, "stream": True, "n": 8}


@contextmanager
def process(folder: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run ``jaxinfer serve`` until it answers; yield the process and its address."""
    command = [sys.executable, "-m", "jaxinfer", "serve", "--model", str(folder), "--name", NAME, "--port", "0"]
    command += ["--max-len", "200", "--strategy", STRATEGY]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    with subprocess.Popen([*command, *options], cwd=ROOT, env=kept, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        try:
            line = child.stderr.readline()
            found = re.fullmatch(rf"{NAME} on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line + child.stderr.read()
            yield child, found[1]
        finally:
            child.kill()


@pytest.mark.slow
def test_a_signal_ends_admission_and_what_runs_is_finished(trained_folder: Path, tmp_path: Path) -> None:
    """The server has a chat template that is not the model's own, whose special tokens it may write."""
    template = tmp_path / "template"
    template.write_text("{{ eos_token }}{{ messages[0].content }}?")
    with (
        process(trained_folder, "--chat-template", str(template)) as (child, address),
        httpx.Client(base_url=address, timeout=SECONDS, verify=False) as client,
    ):
        conversation = {"messages": [{"role": "user", "content": "hi"}]}
        ids = client.post("/tokenize", json=conversation).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<|end|>hi?"}
        lines: list[str] = []
        with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            parts = answer.iter_text()
            lines.append(next(parts))
            child.send_signal(signal.SIGTERM)
            refused = lambda: client.get("/ready").json()["status"]  # noqa: E731
            while (status := refused()) != "the server is shutting down":
                assert status in ("ok", "programs are being compiled")
            late = client.post("/v1/completions", json=STREAM)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "server_unavailable")
            assert "retry-after" in late.headers
            assert client.get("/health").status_code == 200
            lines += parts
        events = [json.loads(line.removeprefix("data: ")) for line in "".join(lines).strip().split("\n\n")[:-1]]
        assert sum(event["choices"][0]["finish_reason"] == "length" for event in events) == 8
        assert "".join(lines).endswith("data: [DONE]\n\n")
        assert child.wait(SECONDS) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""


class Idle(Served):
    """As much of what is served as ending it needs, and an engine whose warming never ends."""

    def __init__(self, **options: Any) -> None:
        self.options = ServerOptions("m", **options)
        self.live: set[Any] = set()
        self.is_draining = False
        self.is_closed = threading.Event()
        self.engine: Any = self

    def warm(self) -> None:
        self.is_closed.wait()

    def close(self, *, cancel: bool) -> None:
        self.is_closed.set()


class Endless:
    """A generation that ends only when it is cancelled."""

    def __init__(self, live: set[Any]) -> None:
        self._live = live
        live.add(self)

    def cancel(self) -> None:
        self._live.discard(self)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Serving, Idle, list[int]]]:
    """Return a function that makes a server of nothing, what it serves, and the codes with which it left at once."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    monkeypatch.setattr("jaxinfer.server.serving.make_app", lambda served: app)

    def make(**options: Any) -> tuple[Serving, Idle, list[int]]:
        served: Any = Idle(**options)
        codes: list[int] = []
        return Serving(served, listen("127.0.0.1", 0), codes.append), served, codes

    return make


def test_the_grace_time_ends_what_does_not_end(idle: Callable[..., tuple[Serving, Idle, list[int]]]) -> None:
    serving, served, codes = idle(grace_seconds=0.1)
    Endless(served.live)
    serving.run(lambda address: serving.stop())
    assert (served.live, served.is_closed.is_set(), codes) == (set(), True, [])


def test_a_second_signal_ends_at_once(idle: Callable[..., tuple[Serving, Idle, list[int]]]) -> None:
    serving, served, codes = idle(grace_seconds=60.0)
    endless = Endless(served.live)

    def stop_twice(address: str) -> None:
        serving.stop(signal.SIGTERM)
        assert codes == []
        serving.stop(signal.SIGINT)
        endless.cancel()  # a real process would have left

    serving.run(stop_twice)
    assert codes == [128 + signal.SIGINT]


def test_a_signal_before_the_server_runs_is_not_lost(idle: Callable[..., tuple[Serving, Idle, list[int]]]) -> None:
    serving, served, _ = idle()
    serving.stop()
    assert asyncio.run(asyncio.wait_for(serving._run(lambda address: None), 10.0)) is None
    assert served.is_closed.is_set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "is not a port"),
        (("--port", "x"), "is not a port"),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
        (("--host", "x" * 300), "cannot listen on"),
        (("--strategy", "nonsense"), "nonsense"),
        (("--api-key", ""), "API key"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--max-rows", "0"), "whole number"),
        (("--page-size", "9"), "power of two"),
        (("--preemption", "never"), "invalid choice"),
        (("--grace", "-1"), "number above 0"),
        (("--model", "/nowhere/model"), "/nowhere/model"),
        (("--chat-template", "/nowhere/template"), "/nowhere/template"),
        (("--chat-template", "/dev/zero"), "must be a regular file"),
    ],
)
def test_mistakes_are_one_line(run: Callable[..., Outcome], options: tuple[str, ...], message: str) -> None:  # noqa: F811
    found = run("serve", "--port", "0", *options)
    assert found.code == 2
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_port_that_is_taken_is_named(run: Callable[..., Outcome]) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = run("serve", "--port", port)
    assert found.code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in found.err


def test_without_the_extra_the_command_says_how_to_get_it(
    run: Callable[..., Outcome],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    found = run("serve")
    assert (found.code, found.out) == (2, "")
    assert found.err == 'error: serve needs packages that are not installed: pip install "jaxinfer[serve]"\n'
