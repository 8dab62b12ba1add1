"""An answer of the server is that of `LanguageModel.generate` for the same ids, seed and sampling, in every bit.

Whatever else it serves: streams, several samples, clients that leave.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxinfer import GenerationResult, SamplingParams
from tests.server.harness import LONG, SECONDS, Running, http_request
from tests.toys import encode_bytes

# The last is computed in chunks; the others are padded alike, since what generate compiles is what takes the time.
PROMPTS = ("The old", "A small otter", "One grey", "The quick fox followed the river")


def draw_request(rng: random.Random) -> dict[str, Any]:
    """Return the fields of a completion request, all of which are the library's too."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.0]),
        "top_p": rng.choice([1, 0.9]),
        "top_k": rng.choice([0, 20]),
        "min_p": rng.choice([0, 0.02]),
        "repetition_penalty": rng.choice([1, 1.2]),
        "presence_penalty": rng.choice([0, 0.4]),
        "seed": rng.randrange(2**53),
        "n": rng.choice([1, 1, 2]),
    }
    if rng.random() < 0.3:
        fields["stop"] = [rng.choice(["fo", "e ", "moon"])]
    return fields


def answer_of(server: Running, prompt: str, fields: dict[str, Any], number: int) -> list[tuple[Any, ...]]:
    """Return text, ids and log-probabilities of each sample, from a stream or a whole answer."""
    request = {"prompt": prompt if number % 2 else encode_bytes(prompt), **fields, "max_tokens": 30, "logprobs": 0}
    request |= {"return_token_ids": True, "priority": number % 3, "cache_salt": "x" * (number % 2)}
    if number % 3 == 0:
        choices = server.complete(**request).json()["choices"]
        return [
            (one["text"], one["token_ids"], one["logprobs"]["token_logprobs"], one["finish_reason"]) for one in choices
        ]
    found: list[Any] = [["", [], [], None] for _ in range(fields["n"])]
    for event in server.events("/v1/completions", **request):
        (one,) = event["choices"]
        into = found[one["index"]]
        into[0] += one["text"]
        into[1] += one.get("token_ids", [])
        into[2] += one["logprobs"]["token_logprobs"] if one["logprobs"] else []
        into[3] = one["finish_reason"]
    return [tuple(one) for one in found]


def bits(result: GenerationResult) -> tuple[Any, ...]:
    return result.text, list(result.tokens), list(result.logprobs), result.finish_reason


@pytest.mark.exhaustive
def test_load_changes_no_bit_of_an_answer(server: Running) -> None:
    rng = random.Random(5)
    jobs = [(rng.choice(PROMPTS), draw_request(rng), number) for number in range(24)]

    def leave(_: int) -> None:
        with server.connect() as connection:
            connection.sendall(http_request("/v1/completions", json.dumps({**LONG, "stream": True}).encode()))
            connection.recv(1)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(answer_of, server, *job) for job in jobs]
        left = [pool.submit(leave, number) for number in range(4)]
        found = [answer.result(SECONDS) for answer in answers]
        assert all(one.result(SECONDS) is None for one in left)
    for (prompt, fields, _), answer in zip(jobs, found):
        sampling = SamplingParams(**fields, logprobs=True)
        expected = server.lm.generate(prompt, max_new_tokens=30, sampling=sampling, batch_size=1)
        assert answer == [bits(result) for result in expected]
    assert server.engine.metrics().accepted_tokens > 0
