"""A server lists its adapters beside the model, and answers by the one that a request names as its model."""

from dataclasses import replace

import pytest

import jaxinfer
from jaxinfer.errors import InvalidOption
from jaxinfer.server.api.completions import read_completion
from jaxinfer.server.api.embeddings import read_embeddings
from jaxinfer.server.api.errors import ApiError
from jaxinfer.server.api.sampling import Limits
from jaxinfer.server.fingerprint import system_fingerprint
from jaxinfer.server.log.file import read_log
from jaxinfer.server.log.replay import check_replays, replay
from tests.server.harness import MODEL, PROMPT, running
from tests.server.test_log import logging_to
from tests.toy_adapters import write_adapter

LIMITS = Limits(MODEL, 258, 90, ("poems",))


@pytest.fixture(scope="module")
def served(trained_folder, tmp_path_factory):
    lm = jaxinfer.load(trained_folder, max_len=128)
    lm.load_adapter("poems", write_adapter(tmp_path_factory.mktemp("poems"), lm.config))
    with running(lm) as server:
        server.until(lambda: server.get("/ready").status_code == 200)
        yield server


@pytest.mark.slow
def test_an_adapter_is_a_model_of_its_own(served):
    assert [model["id"] for model in served.get("/v1/models").json()["data"]] == [MODEL, "poems"]
    assert served.get("/v1/models/poems").json()["id"] == "poems"
    assert served.get("/v1/models/prose").status_code == 404
    texts = {}
    for name, adapter in ((MODEL, None), ("poems", "poems")):
        answer = served.complete(model=name, prompt=PROMPT, max_tokens=16, temperature=0).json()
        (expected,) = served.lm.generate(PROMPT, max_new_tokens=16, adapter=adapter)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected.text)
        assert answer["system_fingerprint"] == system_fingerprint(served.lm, adapter)
        texts[name] = expected.text
    assert len(set(texts.values())) == 2
    refused = served.complete(model="prose", prompt=PROMPT)
    assert refused.status_code == 404
    assert f"use '{MODEL}' or 'poems'" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_log_names_the_adapter_by_which_a_request_is_answered_again(served, tmp_path):
    with logging_to(served, tmp_path / "log"):
        for name in (MODEL, "poems"):
            served.complete(model=name, prompt=PROMPT, max_tokens=8, temperature=0.9, seed=4)
    entries = [entry for _, entry in read_log(tmp_path / "log", print)]
    assert [entry.adapter for entry in entries] == [None, "poems"]
    for entry in entries:
        check_replays(served.lm, entry)
        found = replay(served.lm, entry)
        assert (found.equal, found.answers) == (1, 1)
    with pytest.raises(InvalidOption, match="was answered with adapter 'prose': give --adapter prose=PATH"):
        check_replays(served.lm, replace(entries[1], adapter="prose"))
    with pytest.raises(InvalidOption, match="was answered by"):
        check_replays(served.lm, replace(entries[1], adapter=None))


@pytest.mark.exhaustive
def test_scores_and_embeddings_are_the_adapters(served):
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    scores = [served.complete(model=name, **asked).json()["choices"][0]["logprobs"] for name in (MODEL, "poems")]
    assert scores[0]["token_logprobs"] != scores[1]["token_logprobs"]
    vectors = [served.post("/v1/embeddings", {"model": name, "input": PROMPT}).json() for name in (MODEL, "poems")]
    assert vectors[0]["data"] != vectors[1]["data"]
    assert [answer["model"] for answer in vectors] == [MODEL, "poems"]
    schema = served.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["requestBody"]
    assert "poems" in str(schema)


def test_the_name_of_the_model_chooses_the_adapter(tiny_llama_folder):
    tokenizer = jaxinfer.load(tiny_llama_folder()).tokenizer
    for name, adapter in ((MODEL, None), ("poems", "poems")):
        body = {"model": name, "prompt": PROMPT}
        assert read_completion(body, LIMITS, tokenizer).adapter == adapter
        asked = read_embeddings({"model": name, "input": PROMPT}, LIMITS, tokenizer, 48)
        assert asked.adapter == adapter
    with pytest.raises(ApiError, match="use 'fable' or 'poems'"):
        read_completion({"model": "prose", "prompt": PROMPT}, LIMITS, tokenizer)


def test_a_fingerprint_names_all_that_decides_an_answer(tiny_llama_folder, tmp_path):
    folder = tiny_llama_folder()
    lm = jaxinfer.load(folder)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        lm.load_adapter(name, write_adapter(tmp_path / name, lm.config, seed))
    plain, one, same, other = (system_fingerprint(lm, name) for name in (None, "one", "same", "other"))
    assert len({plain, one, other}) == 3
    assert one == same
    ways = (
        {"weights": "int8"},
        {"weights": "int8", "activations": "int8"},
        {"cache_dtype": "int8"},
        {"sparsity": "topk:4"},
    )
    assert len({plain, *(system_fingerprint(jaxinfer.load(folder, **way)) for way in ways)}) == 5
    short = jaxinfer.load(folder, dtype="bfloat16")
    assert short.backend.cache_dtype == "float16"
    wide = short.changed(short.params, backend=replace(short.backend, cache_dtype="float32"))
    assert system_fingerprint(short) != system_fingerprint(wide)
