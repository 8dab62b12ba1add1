"""An embedding is the mean of a text's final hidden states, of length 1, however it is asked for."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import output_logits
from jaxinfer.server.api.embeddings import EmbeddingJob, embeddings_answer
from tests.server.harness import MODEL, PROMPT, Running
from tests.toys import encode_bytes

IDS = encode_bytes(PROMPT)
# All texts here have up to 16 tokens: programs are made for one length.
OTHER = "A fox and a hen"


def embed(server: Running, given: Any, **fields: Any) -> Any:
    return server.post("/v1/embeddings", {"model": MODEL, "input": given, **fields})


def test_it_is_the_mean_of_the_final_hidden_states(server: Running) -> None:
    """The output matrix, which is linear, makes of it the mean of the text's logits, but for the length."""
    for text in (PROMPT, OTHER, "x"):
        ids = encode_bytes(text)
        vector = np.asarray(embed(server, text).json()["data"][0]["embedding"], np.float32)
        assert vector.shape == (server.lm.config.model_dim,)
        assert abs(np.linalg.norm(vector) - 1) < 1e-6
        found_V = np.asarray(output_logits(server.lm.programs.decoder, server.lm.params, jnp.asarray(vector)[None]))[0]
        mean_V = np.asarray(server.lm.logits([ids]), np.float64)[0].mean(axis=0)
        scale = np.linalg.norm(mean_V) / np.linalg.norm(found_V)
        assert np.allclose(scale * found_V, mean_V, atol=1e-3 * np.abs(mean_V).max())


def test_texts_ids_and_lists_of_either_give_the_same_bits_in_order(server: Running) -> None:
    alone = [embed(server, text).json()["data"][0]["embedding"] for text in (PROMPT, OTHER)]
    for given in ([PROMPT, OTHER], [IDS, encode_bytes(OTHER)], [PROMPT, encode_bytes(OTHER)]):
        found = embed(server, given, user="me").json()
        assert [one["index"] for one in found["data"]] == [0, 1]
        assert [one["embedding"] for one in found["data"]] == alone
        tokens = len(IDS) + len(OTHER)
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert embed(server, IDS).json()["data"][0]["embedding"] == alone[0]
    assert alone[0] != alone[1]


def test_the_official_client_reads_it(server: Running) -> None:
    """It asks for base64 unless it is told otherwise."""
    expected = embed(server, PROMPT, dimensions=server.lm.config.model_dim).json()["data"][0]["embedding"]
    create = server.client().embeddings.create
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = create(model=MODEL, input=[PROMPT], **options)
        found: Any = answer.data[0].embedding
        if options.get("encoding_format") == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4").tolist()
        assert found == expected
        assert answer.model == MODEL


def test_base64_has_the_same_bytes_on_every_machine() -> None:
    job = EmbeddingJob(((1,),), True)
    for order in ("<f4", ">f4"):
        answer = embeddings_answer(job, [np.array([1.0], order)], "m", "f")
        assert answer["data"][0]["embedding"] == base64.b64encode(b"\0\0\x80\x3f").decode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x", 3]}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": ["x", [9999]]}, "input[1]"),
        ({"input": "x" * 201}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": 3}, "encoding_format"),
        ({"dimensions": 31}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"user": 3}, "user"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_wrong_fields_are_named(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/embeddings", {"model": MODEL, "input": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert embed(server, "x", model="gpt").status_code == 404


def test_texts_that_take_too_long_or_are_too_many_are_refused(server: Running) -> None:
    options, scorer = server.served.options, server.served.scorer
    server.served.options = replace(options, request_seconds=1e-9)
    try:
        assert embed(server, PROMPT).status_code == 504
    finally:
        server.served.options = options
    scorer._waiting += scorer._most_waiting
    try:
        assert embed(server, PROMPT).status_code == 429
    finally:
        scorer._waiting -= scorer._most_waiting


def test_the_end_of_the_server_ends_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def embed_for_ever(texts: Any, seconds: float, adapter: str | None) -> Any:
        while not server.served.live:
            await asyncio.sleep(0.01)
        for work in list(server.served.live):
            work.cancel()
        await asyncio.sleep(60.0)

    monkeypatch.setattr(server.served.scorer, "embed", embed_for_ever)
    answer = embed(server, PROMPT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_cancelled")
    assert not server.served.live
