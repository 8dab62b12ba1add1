"""Tables of talks are made by the commands themselves, on toys: from prompts and training to the chart."""

import contextlib
import importlib
import json
from dataclasses import replace

import pytest

from jaxinfer.checkpoint.drafters.streams import write_streams
from jaxinfer.cli.main import main
from jaxinfer.models.drafters.streams import StreamsConfig
from tests.models.drafters.dense_streams import random_streams
from tests.toys import TINY_LLAMA, fable
from tests.train.fables import write_fables
from tests.train.talks.test_tables import E2E
from train import recipe
from train.command import run_command
from train.talks import __main__ as talks

SQL = [{"text": f"{line[:20]}\nA: {line[20:]}"} for line in fable(24, seed=4).splitlines()]


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a function that makes a table of the toy, with all its commands in this process."""

    def call(command, *words, to=None):
        words = list(map(str, words))
        if command == "jaxinfer":
            with to.open("w") as file, contextlib.redirect_stdout(file):
                code = main(words)
        else:
            home = {"train.data": "train.data.__main__", "train.streams": "train.streams.__main__"}
            home |= {f"train.{name}": f"train.{name}.__main__" for name in ("distill", "layerskip")}
            module = importlib.import_module(home.get(command, command))
            run = getattr(module, "run", lambda options: options.run(options))
            with contextlib.ExitStack() as stack:
                if to is not None:
                    stack.enter_context(contextlib.redirect_stdout(stack.enter_context(to.open("w"))))
                code = run_command(command, "", module.add_arguments, run, words)
        assert code == 0

    monkeypatch.setattr(recipe, "call", call)
    for name in ("tasks/wikisql", "prompts"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for split in ("train", "test"):
        lines = "".join(f"{json.dumps(one)}\n" for one in SQL)
        (tmp_path / "data" / "tasks" / "wikisql" / f"{split}.jsonl").write_text(lines)
    (tmp_path / "data" / "tasks" / "e2e_dev.csv").write_text(E2E)

    def made(name, *words):
        same = ("--work", tmp_path / "work", *words)
        code = run_command("talks", "", talks.add_arguments, talks.run, [name, *map(str, same)])
        assert code == 0
        assert "</svg>" in (tmp_path / "work" / f"{name}.svg").read_text()
        return json.loads((tmp_path / "work" / f"{name}.json").read_text())

    return made


@pytest.fixture
def measured(tmp_path):
    """Return what measured tables are told besides the model: its data, and one prompt of each task."""
    return "--data", tmp_path / "data", "--prompts", 1, "--repeats", 1, "--max-new-tokens", 12


@pytest.mark.exhaustive
def test_trees_are_measured_pruned_and_not(make, measured, tmp_path, tiny_llama_folder):
    shape = StreamsConfig(num_streams=2, num_layers=1, rank=4, exit_rank=5)
    config = replace(TINY_LLAMA, vocab_size=258)
    write_streams(tmp_path / "streams", shape, random_streams(config.model_dim, 2), config)
    words = ("--depth", 2, "--k", 2, "--keep", 3, "--streams", tmp_path / "streams", "--topology", "none")
    table = make("tree-size", "--model", tiny_llama_folder(), *measured, *words, "--tasks", "sql")
    assert [(row["k"], row["keep"], row["nodes"]) for row in table["rows"]] == [(2, 0, 7), (2, 3, 7)]
    assert all(1 <= row["tokens_per_step"] <= 3 and row["speed_up"] > 0 for row in table["rows"])


@pytest.mark.exhaustive
def test_drafters_are_trained_measured_and_priced(make, measured, tiny_llama_folder):
    learned = ("--texts", 24, "--epochs", 2, "--tasks", "sql", "e2e")
    bits = ("--bits", "int8", "--student-layers", 1, "--length", 512)
    table = make("two-models", "--model", tiny_llama_folder(), *measured, *learned, *bits, "--streams", "prompt_lookup")
    rows = {row["name"]: row for row in table["tasks"][0]["rows"]}
    assert rows["itself in int8"]["target_calls"] < rows["plain"]["target_calls"]
    assert rows["distilled, 1 layers"]["draft_calls"] == 4 * rows["distilled, 1 layers"]["target_calls"]
    assert len(make("break-even")["points"]) == 4


@pytest.mark.exhaustive
def test_streams_are_trained_by_layers_beside_heads(make, measured, trained_folder, tmp_path):
    same = ("--model", trained_folder, "--data", write_fables(tmp_path), "--epochs", 1, "--held-out", 0.1)
    recipe.call("train.medusa", *same, "--heads", 2, "--out", tmp_path / "heads")
    shape = ("--layers", 1, "--streams", 2, "--row-length", 128, "--positions", 32)
    recipe.call("train.streams", *same, *shape, "--out", tmp_path / "streams")
    named = ("--medusa", f"medusa:heads={tmp_path / 'heads' / 'heads'}")
    named += ("--streams", f"streams:heads={tmp_path / 'streams' / 'streams'}")
    learned = ("--texts", 24, "--epochs", 2, "--tasks", "sql", "--layers", 1, "--adapter-rank", 2)
    table = make("streams", "--model", trained_folder, *measured, *learned, *named)
    assert 0 <= table["tasks"][0]["marks"]["exact"] <= 1
    assert table["parameters"]["streams"]["formula"] == 20 * 48
    assert [row["name"] for row in table["ablation"]["rows"]] == ["Medusa", "streams, 1"]


@pytest.mark.exhaustive
def test_students_learn_by_divergence_share_and_filtered_data(make, trained_folder):
    small = ("--texts", 32, "--max-new-tokens", 40, "--length", 64, "--epochs", 4, "--eval-every", 4)
    words = ("--divergences", "forward_kl", "total_variation", "--on-policy", 0, 0.5, "--student-layers", 1)
    found = make("distil", "--model", trained_folder, *words, *small)["rows"]
    assert [(row["data"], row["on_policy"]) for row in found[:4]] == [("all", 0), ("all", 0.5)] * 2
    assert [row["data"] for row in found[4:]] == ["half by first", "half by likelihood", "half by checks"]
    assert all(0 < row["acceptance"] < 1 and row["curve"] for row in found)


@pytest.mark.exhaustive
def test_a_family_is_trained_and_rounded(make, trained_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(fable(600, seed=8))
    words = ("--like", trained_folder, "--text", text, "--widths", 32, 64, "--bits", 2, 8, "--layers", 2)
    table = make("bits", *words, "--length", 64, "--tokens", 600, "--epochs", 3)
    by_bits = {(row["width"], row["bits"]): row["perplexity"] for row in table["rows"]}
    assert by_bits[64, 32] <= by_bits[64, 9] * 1.02 < by_bits[64, 3]


@pytest.mark.exhaustive
def test_batching_is_measured(make, trained_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': line})}\n" for line in fable(4, seed=2).splitlines()))
    words = ("--model", trained_folder, "--prompts", prompts, "--requests", 4, "--at-once", 2, "--spread", 0, 1)
    table = make("static-continuous", *words, "--max-new-tokens", 6, "--max-len", 256)
    assert [(row["at_once"], row["spread"]) for row in table["rows"]] == [(2, 0), (2, 1)]
    assert all(row["ratio"] > 0 for row in table["rows"])
