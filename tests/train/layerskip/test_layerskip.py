"""A model whose first layers draft for it: the command as a user runs it, from scratch and on, on a tiny model."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxinfer
from jaxinfer.models.fingerprint import fingerprint
from tests.parallel.devices import several
from tests.toys import TINY_LLAMA, fable, write_byte_tokenizer
from train.command import run_command
from train.layerskip import __main__ as layerskip
from train.loop.fit import read_metrics
from train.model.export import describe_config

CONFIG = replace(TINY_LLAMA, num_layers=3)
OPTIONS = ("--length", 64, "--batch-size", 8, "--eval-every", 30, "--held-out", 0.1, "--exit-scale", 1, "--rotate", 2)
SCRATCH = (*OPTIONS, "--learning-rate", 1e-2, "--epochs", 0.7, "--save-every", 5, "--eval-every", 6)
LONG = (*OPTIONS, "--learning-rate", 1e-2, "--epochs", 6, "--save-every", 20)


def train(*arguments):
    return run_command("layerskip", "", layerskip.add_arguments, layerskip.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A configuration with a tokenizer beside it, and texts."""
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("scratch"))
    (folder / "config.json").write_text(json.dumps(describe_config(CONFIG)))
    lines = fable(400, seed=3).splitlines()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def run(scratch, tmp_path_factory):
    out = tmp_path_factory.mktemp("layerskip") / "run"
    assert train("--init", scratch, "--data", scratch / "texts.jsonl", *SCRATCH, "--out", out) == 0
    return out


def tokens_per_step(lm):
    prompts = [line[:9] for line in fable(4, seed=77).splitlines()]
    drafted = lm.generate(prompts, max_new_tokens=24, strategy="layerskip:exit_layer=1,num_draft_tokens=3")
    return sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted)


def best_figures(lines):
    return max((line["evaluation"] for line in lines if "evaluation" in line), key=lambda figures: figures["score"])


@pytest.mark.slow
def test_the_model_that_is_written_has_exits_and_the_tokenizer(run):
    lm = jaxinfer.load(run / "model", scan_layers=True)
    assert lm.config == CONFIG
    assert lm.encode_chat([{"role": "user", "content": "hi"}])
    lm.resolve("layerskip:exit_layer=1,num_draft_tokens=3")


@pytest.mark.slow
def test_the_card_and_the_metrics_say_how_often_each_exit_agrees(run):
    best = best_figures(read_metrics(run / "metrics.jsonl"))
    assert len(best["acceptance"]) == 2
    card = (run / "model" / "README.md").read_text()
    for layer, share in enumerate(best["acceptance"], 1):
        shown = re.search(rf"\| {layer} \| ([\d.]+)% \|", card)
        assert shown
        # Each is rounded, to digits of its own.
        assert float(shown[1]) == pytest.approx(100 * share, abs=0.06)
    assert "| 3 | 100.0% |" in card
    assert "--strategy layerskip:exit_layer=" in card
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.exhaustive
def test_a_model_that_was_trained_longer_drafts_well(scratch, tmp_path):
    out = tmp_path / "run"
    assert train("--init", scratch, "--data", scratch / "texts.jsonl", *LONG, "--out", out) == 0
    assert tokens_per_step(jaxinfer.load(out / "model", scan_layers=True)) > 1.5
    lines = read_metrics(out / "metrics.jsonl")
    losses = [line["whole_model_loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert 0.4 < best_figures(lines)["acceptance"][0] < best_figures(lines)["acceptance"][1] < 1


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_to_the_same_model(run, scratch, tmp_path, monkeypatch):
    """Stopped between two checkpoints; bit for bit, the layers that are dropped included."""
    arguments = ("--init", scratch, "--data", scratch / "texts.jsonl", *SCRATCH, "--out", tmp_path / "run")
    place, calls = layerskip.place_batch, []

    def stop(batch, mesh):
        calls.append(batch)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return place(batch, mesh)

    monkeypatch.setattr(layerskip, "place_batch", stop)
    assert train(*arguments) == 130
    monkeypatch.setattr(layerskip, "place_batch", place)
    assert train(*arguments) == 0
    written = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert written == (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_adapters_alone_raise_the_exits_of_a_model_that_had_none(trained_folder, scratch, tmp_path):
    """What is written has them merged; before any training the exit of its first layer is that of the base."""
    arguments = ("--model", trained_folder, "--data", scratch / "texts.jsonl", *OPTIONS[:-2], "--lora-rank", 4)
    more = ("--epochs", 1, "--eval-every", 1, "--learning-rate", 1e-2, "--warmup", 0, "--out", tmp_path / "run")
    assert train(*arguments, *more, "--curriculum", "none", "--microbatches", 2) == 0
    figures = [line["evaluation"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "evaluation" in line]
    assert figures[-1]["acceptance"][0] > figures[0]["acceptance"][0] + 0.05
    written = jaxinfer.load(tmp_path / "run" / "model", scan_layers=True)
    base = jaxinfer.load(trained_folder, scan_layers=True)
    assert written.config == base.config
    np.testing.assert_array_equal(written.params["embed"]["embedding"], base.params["embed"]["embedding"])
    assert fingerprint(written.params) != fingerprint(base.params)
    assert f"fingerprint `{fingerprint(base.params)}`" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.exhaustive
def test_a_dry_run_says_what_a_run_takes_and_makes_nothing(scratch, tmp_path, capsys):
    arguments = ("--init", scratch / "config.json", "--data", scratch / "texts.jsonl", *SCRATCH)
    assert train(*arguments, "--out", tmp_path / "run", "--dry-run") == 0
    lines = capsys.readouterr().out
    assert " trained, 0 frozen" in lines
    assert "GFLOP a step" in lines
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_mistakes_end_in_one_line(run, scratch, trained_folder, tiny_llama_folder, tmp_path, capsys):
    texts, long, bare = scratch / "texts.jsonl", tmp_path / "long.jsonl", tmp_path / "bare"
    long.write_text(json.dumps({"text": "x" * 2000}) + "\n")
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(describe_config(CONFIG)))
    same = ("--model", trained_folder, "--data", texts)
    cases = {
        "invalid choice: 'spiral'": (*same, "--curriculum", "spiral"),
        f"{long}, line 1: the text has 2000 tokens, but there is room for 64": (
            *("--model", trained_folder, "--data", long),
        ),
        "holds a run with base": (*same, "--out", run, *SCRATCH),
        "a model of one layer has no exit": ("--model", tiny_llama_folder(num_layers=1), "--data", texts),
        "none.json: no such file": ("--init", tmp_path / "none.json", "--data", texts),
        f"{bare} has no tokenizer": ("--init", bare, "--data", texts),
        "'1.5' is not a number from 0 to 1": (*same, "--max-drop", 1.5),
    }
    for complaint, arguments in cases.items():
        assert train("--out", tmp_path / "run", *OPTIONS, *arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


MESH = """
import sys
from train.distill import __main__ as distill
from train.layerskip import __main__ as layerskip
from train.command import run_command
trainer = {"layerskip": layerskip, "distill": distill}[sys.argv[1]]
for mesh, parts in (("data=1", "1"), ("data=2,tensor=2", "2")):
    arguments = [*sys.argv[3:], "--out", f"{sys.argv[2]}/{mesh}", "--mesh", mesh, "--microbatches", parts]
    assert run_command(sys.argv[1], "", trainer.add_arguments, trainer.run, arguments) == 0
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("trainer", ["layerskip", "distill"])
def test_a_mesh_changes_nothing_but_rounding(trainer, scratch, trained_folder, tmp_path):
    """Rows over two devices and in two parts, every matrix over two, against one of each; no layer is dropped."""
    environment = {**os.environ, **several(4)}
    own = ("--student-layers", 1, "--on-policy", 0.5, "--samples", 8, "--max-new-tokens", 8)
    own = ("--max-drop", 0) if trainer == "layerskip" else own
    options = ("--model", trained_folder, "--data", scratch / "texts.jsonl", "--length", 64, "--batch-size", 8, *own)
    command = [sys.executable, "-c", MESH, trainer, str(tmp_path), *map(str, options), "--epochs", "0.3"]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], check=True, stderr=subprocess.DEVNULL)
    metrics = (read_metrics(tmp_path / mesh / "metrics.jsonl") for mesh in ("data=1", "data=2,tensor=2"))
    one, split = ([(line["loss"], line["gradient_norm"]) for line in lines if "loss" in line] for lines in metrics)
    assert len(one) >= 1
    np.testing.assert_allclose(split, one, rtol=2e-3)
