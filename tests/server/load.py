"""Clients of every kind, many at once: those that wait, that stream, that read slowly, that leave, that are wrong."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

KEY = "secret"
_HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
_PATH = "/v1/completions"
# A reader that is slow waits so long before each part.
_SLOW_SECONDS = 0.01

# Text, ids, log-probabilities and why it ended.
Answer = tuple[Any, ...]


@dataclass(frozen=True)
class Question:
    """A request whose answer is known."""

    fields: Mapping[str, Any]
    answer: Answer


@dataclass
class Figures:
    """What clients have seen: ends by kind, what was wrong, and times in seconds."""

    ends: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)

    def count(self, kind: str) -> None:
        self.ends[kind] = self.ends.get(kind, 0) + 1

    def forget_times(self) -> None:
        """Begin anew with times: those until now are of compiling, too."""
        self.first_token.clear()
        self.between_tokens.clear()

    def times(self) -> str:
        """Return the median and the 99th percentile of times, in milliseconds."""
        named = {"first token": self.first_token, "between tokens": self.between_tokens}
        return ", ".join(
            f"{name} {1e3 * statistics.median(values):.1f} ms (99 in 100 within {1e3 * _percentile(values):.1f} ms)"
            for name, values in named.items()
            if values
        )


def _percentile(values: Sequence[float], share: float = 0.99) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


class Clients:
    """Clients that ask a server the same questions in many ways; ``has_keys`` tells whether it asks for `KEY`."""

    def __init__(self, address: str, questions: Sequence[Question], most_body_bytes: int, *, has_keys: bool) -> None:
        self._address, self._questions = address, questions
        self.figures = Figures()
        no_key = self._wrong(b"{}", 401, "invalid_api_key", {"Authorization": "Bearer x"})
        # The likelier ones stand more than once.
        self._kinds: tuple[tuple[str, Callable[..., Awaitable[None]]], ...] = (
            *(("whole", self._whole),) * 6,
            *(("stream", self._stream),) * 6,
            ("slow reader", self._slow),
            *(("leaves", self._leaves),) * 2,
            ("broken JSON", self._wrong(b"{", 400, "invalid_json")),
            ("huge body", self._wrong(b'{"prompt": "' + b"x" * most_body_bytes + b'"}', 413, "request_too_large")),
            *((("wrong key", no_key),) if has_keys else ()),
            ("long prompt", self._wrong(self._long(), 400, "context_length_exceeded")),
        )

    def run(self, count: int, connections: int, seed: int) -> None:
        """Send so many requests over so many connections; what was wrong is in the figures."""
        asyncio.run(self._run(count, connections, random.Random(seed)))

    async def _run(self, count: int, connections: int, rng: random.Random) -> None:
        numbers = iter(range(count))
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(
            base_url=self._address, limits=limits, timeout=300.0, verify=False, trust_env=False
        ) as client:

            async def work() -> None:
                for _ in numbers:
                    kind, ask = rng.choice(self._kinds)
                    try:
                        await ask(client, rng.choice(self._questions))
                        self.figures.count(kind)
                    except Exception as error:
                        self.figures.wrong.append(f"{kind}: {error!r:.500}")

            await asyncio.gather(*(work() for _ in range(connections)))

    async def _whole(self, client: httpx.AsyncClient, question: Question) -> None:
        response = await client.post(_PATH, json=question.fields, headers=_HEADERS)
        assert response.status_code == 200, response.text
        (one,) = response.json()["choices"]
        answer = (one["text"], one["token_ids"], one["logprobs"]["token_logprobs"], one["finish_reason"])
        assert answer == question.answer, answer

    async def _stream(self, client: httpx.AsyncClient, question: Question, seconds: float = 0.0) -> None:
        began, last, is_done = time.monotonic(), None, False
        text, tokens, logprobs, finish_reason = "", [], [], None
        body = {**question.fields, "stream": True}
        async with client.stream("POST", _PATH, json=body, headers=_HEADERS) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                await asyncio.sleep(seconds)
                if line == "data: [DONE]":
                    is_done = True
                elif line:
                    (one,) = json.loads(line.removeprefix("data: "))["choices"]
                    new = one.get("token_ids", [])
                    now = time.monotonic()
                    if new and not seconds:
                        if last is None:
                            self.figures.first_token.append(now - began)
                        else:
                            self.figures.between_tokens += [(now - last) / len(new)] * len(new)
                        last = now
                    text += one["text"]
                    tokens += new
                    logprobs += one["logprobs"]["token_logprobs"] if one["logprobs"] else []
                    finish_reason = one["finish_reason"] or finish_reason
        assert is_done
        assert (text, tokens, logprobs, finish_reason) == question.answer, text

    async def _slow(self, client: httpx.AsyncClient, question: Question) -> None:
        await self._stream(client, question, _SLOW_SECONDS)

    async def _leaves(self, client: httpx.AsyncClient, question: Question) -> None:
        """Read the first bytes of a long answer, and close the connection."""
        body = {**question.fields, "stream": True, "max_tokens": 150, "ignore_eos": True}
        async with client.stream("POST", _PATH, json=body, headers=_HEADERS) as response:
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                break

    def _wrong(
        self, body: bytes, status: int, code: str, headers: Mapping[str, str] | None = None
    ) -> Callable[..., Awaitable[None]]:
        async def ask(client: httpx.AsyncClient, question: Question) -> None:
            response = await client.post(_PATH, content=body, headers={**_HEADERS, **(headers or {})})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text

        return ask

    def _long(self) -> bytes:
        return json.dumps({**self._questions[0].fields, "prompt": "x" * 500}).encode()
