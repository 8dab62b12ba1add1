"""How long tokens take that several clients stream at once: ``python -m tests.server.clients.latency URL``.

It asks any server with OpenAI's ``/v1/completions`` (this one, llama.cpp's) for answers of one length to texts of one
length, that no cache has. The time between tokens is a request's mean, as `jaxinfer bench throughput` has it; the wait
between parts is what a reader sees, and a part may have several tokens. It needs httpx alone.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ["river", "stone", "quiet", "morning", "letter", "garden", "window", "winter", "paper", "silver", "market"]


@dataclass
class Times:
    """Seconds, over all requests of a load."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def prompt(rng: random.Random, words: int) -> str:
    return "A story. " + " ".join(rng.choice(WORDS) for _ in range(words)) + ". Once upon a time"


async def ask(client: httpx.AsyncClient, model: str, text: str, tokens: int, times: Times) -> None:
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, seen, written = time.perf_counter(), [], None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if part.get("usage"):
                written = part["usage"]["completion_tokens"]
            if part["choices"] and part["choices"][0]["text"]:
                seen.append(time.perf_counter())
    assert written == tokens, f"{written} tokens came, not {tokens}"
    times.first.append(seen[0] - began)
    times.between.append((seen[-1] - seen[0]) / (tokens - 1))
    times.waits += [after - before for before, after in itertools.pairwise(seen)]


async def load(address: str, at_once: int, requests: int, words: int, tokens: int, seed: int) -> Times:
    """Let so many clients ask, each anew when it has its answer, until all requests are answered."""
    times, rng, numbers = Times(), random.Random(seed), iter(range(requests))
    # Each request has a connection of its own: some servers close one that they said to keep.
    given: dict[str, Any] = {"base_url": address, "timeout": 600.0, "verify": False, "trust_env": False}
    async with httpx.AsyncClient(**given, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def work() -> None:
            for _ in numbers:
                await ask(client, model, prompt(rng, words), tokens, times)

        await asyncio.gather(*(work() for _ in range(at_once)))
    return times


def shown(values: Sequence[float]) -> str:
    high = sorted(values)[min(int(0.99 * len(values)), len(values) - 1)]
    return f"{1e3 * statistics.median(values):.1f} / {1e3 * high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="URL")
    parser.add_argument("--at-once", default="1,4,8")
    parser.add_argument("--requests", type=int, default=6, help="for each client")
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts: another has others")
    options = parser.parse_args()
    print("median / 99th percentile, ms | first token | between tokens | between parts | seconds")
    for at_once in map(int, options.at_once.split(",")):
        asked = options.address.rstrip("/"), at_once, at_once * options.requests, options.words, options.tokens
        began = time.perf_counter()
        times = asyncio.run(load(*asked, options.seed * 1000 + at_once))
        seconds = time.perf_counter() - began
        print(f"{at_once} | {shown(times.first)} | {shown(times.between)} | {shown(times.waits)} | {seconds:.1f}")


if __name__ == "__main__":
    main()
