"""Servers that tests run in threads of their own process, and what tests send to them by hand."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from jaxinfer.language_model import LanguageModel
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.served import Served
from jaxinfer.server.serving import Serving, listen
from tests.late_imports import late

openai = late("openai")

MODEL = "fable"
STRATEGY = "prompt_lookup"
ENGINE: dict[str, Any] = {
    # What a stream and a whole answer accept is compared, so windows do not follow the clock.
    "drafting": "always",
    "max_rows": 2,
    "page_size": 8,
    "pages": 60,
    "prefill_chunk": 16,
    "steps_per_look": 4,
    "max_waiting": 16,
}
PROMPT = "The old"
# So many tokens that they take a while.
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 150, "temperature": 1.5, "seed": 1, "ignore_eos": True}
SECONDS = 30.0
# Each request has a connection of its own.
ALONE = httpx.Limits(max_keepalive_connections=0)


class Running:
    """A server that runs, and how to reach it."""

    def __init__(self, serving: Serving, served: Served, address: str, thread: threading.Thread) -> None:
        self.serving, self.served, self.address, self.thread = serving, served, address, thread
        self.lm, self.engine = served.lm, served.engine
        host, _, port = address.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        # Requests share what takes long to make.
        self.http = httpx.Client(base_url=address, timeout=SECONDS, limits=ALONE, verify=False, trust_env=False)

    def client(self, key: str = "none") -> "openai.OpenAI":
        # Connections that are kept would stay open until the garbage collector meets them, in whatever test that is.
        alone = httpx.Client(timeout=SECONDS, limits=ALONE, verify=False, trust_env=False)
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=SECONDS, http_client=alone
        )

    def async_client(self) -> "openai.AsyncOpenAI":
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": MODEL, **fields})

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the objects of a stream, which must end as it should."""
        lines = self.post(path, {"model": MODEL, **fields, "stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=SECONDS)

    def until(self, holds: Callable[[], bool], seconds: float = SECONDS) -> float:
        """Wait until something holds, and return how long it took."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < seconds
            time.sleep(0.02)
        return time.monotonic() - began

    @property
    def is_idle(self) -> bool:
        now = self.engine.metrics()
        return not (now.waiting or now.prefilling or now.running or now.pages_in_use or self.served.live)


@contextmanager
def running(
    lm: LanguageModel, leave: Callable[[int], object] = int, engine: Mapping[str, Any] = ENGINE, **options: Any
) -> Iterator[Running]:
    """Serve a model with changed `ServerOptions`."""
    served = Served(lm, lm.engine(strategy=STRATEGY, **engine), ServerOptions(**{"model": MODEL, **options}), STRATEGY)
    serving = Serving(served, listen("127.0.0.1", 0), leave)
    addresses: list[str] = []
    has_begun = threading.Event()

    def begin(address: str) -> None:
        addresses.append(address)
        has_begun.set()

    thread = threading.Thread(target=serving.run, args=(begin,))
    thread.start()
    assert has_begun.wait(SECONDS)
    server = Running(serving, served, addresses[0], thread)
    try:
        yield server
    finally:
        server.http.close()
        if not served.is_draining:
            serving.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()


def http_request(path: str, body: bytes, *, length: int | None = None, more: str = "") -> bytes:
    """Return a request as it goes over the wire; ``length`` is what it says of its body."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
