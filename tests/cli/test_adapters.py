"""``--adapter`` uses a PEFT folder beside the model, or adds it to what is converted; mistakes are one line."""

import json

import pytest

import jaxinfer
from tests.cli.test_mistakes import assert_mistake
from tests.toy_adapters import write_adapter

ASKED = ("generate", "The quick", "--max-new-tokens", "8", "--json", "--dtype", "float32", "--max-len", "64")


@pytest.fixture(scope="module")
def source(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def adapter(source, tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "poems", jaxinfer.load(source).config)


@pytest.mark.exhaustive
def test_generate_and_convert_follow_an_adapter(run, source, adapter, tmp_path):
    outcomes = [run(*ASKED, "--model", source, *more) for more in ((), ("--adapter", adapter))]
    plain, found = (json.loads(outcome.out)["tokens"] for outcome in outcomes)
    assert plain != found
    outcome = run("convert", source, tmp_path / "merged", "--adapter", adapter)
    assert (outcome.code, outcome.err) == (0, f"wrote {tmp_path / 'merged'}\n")
    merged = json.loads(run(*ASKED, "--model", tmp_path / "merged").out)
    assert merged["tokens"] == found


@pytest.mark.exhaustive
def test_a_streamed_text_and_a_conversation_follow_an_adapter(run, source, adapter):
    lm = jaxinfer.load(source, dtype="float32", max_len=64)
    lm.load_adapter("x", adapter)
    expected = lm.generate("The quick", max_new_tokens=8, adapter="x")[0].text
    streamed = [argument for argument in ASKED if argument != "--json"]
    assert run(*streamed, "--model", source, "--adapter", f"x={adapter}").out == expected + "\n"
    limits = ("--max-new-tokens", "8", "--dtype", "float32", "--max-len", "64")
    outcome = run("chat", "--model", source, "--adapter", adapter, *limits, stdin=b"hi\n")
    messages = [{"role": "user", "content": "hi"}]
    assert outcome.out == lm.chat(messages, max_new_tokens=8, adapter="x").text + "\n"


def test_mistakes_are_one_line(run, source, adapter, tmp_path):
    assert_mistake(run(*ASKED, "--model", source, "--adapter", tmp_path / "gone"), "no such folder: give one that PEFT")
    options = ("--adapter", adapter, "--weights", "int8")
    assert_mistake(run("convert", source, tmp_path / "made", *options), "convert without --weights first")
    assert not (tmp_path / "made").exists()
    served = ("serve", "--model", source, "--adapter", f"mine={adapter}")
    assert_mistake(run(*served, "--name", "mine"), "has the model's own name")
