"""A model writes what its users would, up to where the template says that they end."""

import json
import shutil

import pytest

import jaxinfer
from train.command import run_command
from train.data import __main__ as data
from train.data.self_prompts import around_user_text

# What a user says stands between "The " and a full stop, as in the text that the model has learned.
TEMPLATE = "{{ bos_token }}{% for message in messages %}The {{ message.content }}.\n{% endfor %}"
# As in ChatML, a turn ends with a token that ends texts.
TURNS = "{{ bos_token }}{% for message in messages %}The {{ message.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture(scope="module")
def chat_folder(trained_folder, tmp_path_factory):
    return with_template(trained_folder, TEMPLATE, tmp_path_factory.mktemp("chat") / "model")


def prompts(*arguments):
    command = ["prompts", *map(str, arguments)]
    return run_command("data", "", data.add_arguments, lambda options: options.run(options), command)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def written(chat_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    assert prompts("--model", chat_folder, "--out", out, "--count", 20, "--batch-size", 8) == 0
    return out


@pytest.mark.slow
def test_prompts_are_what_the_model_goes_on_with_and_none_comes_twice(chat_folder, written):
    lm, found = jaxinfer.load(chat_folder), read(written)
    assert around_user_text(lm) == ("<|begin|>The ", ".")
    texts = [one["prompt"] for one in found]
    assert len(set(texts)) == len(texts) == 20
    assert sum(text.startswith(("quick ", "old ")) for text in texts) > 15
    opening = lm.tokenizer.encode("<|begin|>The ", add_special_tokens=False)
    for one in found[::9]:
        sampling = jaxinfer.SamplingParams(temperature=1.0, top_p=0.95, seed=one["draw"], stop=(".",))
        (result,) = lm.generate([opening], max_new_tokens=96, sampling=sampling)
        assert one["prompt"] == result.text.strip()
        assert one["category"] == "self-written"


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_prompts(chat_folder, written, tmp_path, capsys):
    """Whatever its batches, since a draw is a function of its own seed."""
    lines = written.read_text().splitlines(keepends=True)
    part = tmp_path / "prompts.jsonl"
    part.write_text("".join(lines[:9]) + lines[9][:11])
    assert prompts("--model", chat_folder, "--out", part, "--count", 20, "--batch-size", 5) == 0
    assert read(part) == read(written)
    assert prompts("--model", chat_folder, "--out", part, "--count", 30, "--temperature", 0.7) == 2
    assert "line 1: was made by another model or other options" in capsys.readouterr().err
    assert read(part) == read(written)


def with_template(folder, template, to):
    shutil.copytree(folder, to)
    settings = json.loads((to / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return to


def test_a_stop_token_needs_no_stop_string(trained_folder, tmp_path):
    lm = jaxinfer.load(with_template(trained_folder, TURNS, tmp_path / "model"))
    assert around_user_text(lm) == ("<|begin|>The ", "")


@pytest.mark.slow
def test_a_stop_token_ends_a_prompt(trained_folder, tmp_path):
    lm = jaxinfer.load(with_template(trained_folder, TURNS, tmp_path / "model"))
    out, opening = tmp_path / "prompts.jsonl", lm.tokenizer.encode("<|begin|>The ", add_special_tokens=False)
    same = ("--model", tmp_path / "model", "--out", out, "--max-new-tokens", 160, "--seed", 3)
    assert prompts(*same, "--count", 4, "--batch-size", 8) == 0
    assert len(read(out)) == 4
    for one in read(out):
        sampling = jaxinfer.SamplingParams(temperature=1.0, top_p=0.95, seed=(3 << 32) + one["draw"])
        (result,) = lm.generate([opening], max_new_tokens=160, sampling=sampling)
        assert result.tokens[-1] in lm.eos_token_ids
        assert one["prompt"] == result.text.strip()


def test_a_turn_that_nothing_ends_is_told(trained_folder, tmp_path, capsys):
    """A special token is no part of the text, so that it cannot stop it, unless it ends texts."""
    folder = with_template(trained_folder, TURNS.replace("eos_token", "bos_token"), tmp_path / "model")
    assert prompts("--model", folder, "--out", tmp_path / "a.jsonl") == 2
    assert "ends a user's text with '<|begin|>', which stops no generation" in capsys.readouterr().err


def test_a_model_that_writes_no_prompt_is_told(chat_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.data.self_prompts._MOST_IN_VAIN", 16)
    arguments = ("--model", chat_folder, "--out", tmp_path / "a.jsonl", "--batch-size", 8)
    assert prompts(*arguments, "--max-new-tokens", 1) == 2
    assert "no new prompt in 16 drawn texts, after 0: raise" in capsys.readouterr().err
    assert prompts(*arguments, "--temperature", 0, "--count", 3) == 2
    assert "no new prompt in 16 drawn texts, after 1: raise" in capsys.readouterr().err
    assert len(read(tmp_path / "a.jsonl")) == 1
    other = with_template(chat_folder, "{{ messages[0].content }}", tmp_path / "other")
    assert prompts("--model", other, "--out", tmp_path / "b.jsonl") == 2
    assert "has nothing before a user's text" in capsys.readouterr().err
