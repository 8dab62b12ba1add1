"""From a base model to heads that draft for it: the commands as a user runs them, on a tiny model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.models.fingerprint import fingerprint
from tests.parallel.devices import several
from tests.toys import fable
from tests.train.loop.test_step import same_tree
from train import arguments as shared
from train import medusa
from train.command import run_command
from train.data import __main__ as data
from train.loop.fit import read_metrics

OPTIONS = ["--held-out", "0.1", "--eval-every", "10", "--window", "16", "--batch-size", "8", "--save-every", "10"]
HEADS = ("--hydra", "--inner", 64, "--share-lm-head", "--draft-vocab", 60, "--heads", 3, "--learning-rate", 3e-3)
EPOCHS = 1.5


def distill(arguments):
    return run_command("data", "", data.add_arguments, lambda options: options.run(options), ["distill", *arguments])


def train_heads(*arguments):
    return run_command("medusa", "", medusa.add_arguments, medusa.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def answers(trained_folder, tmp_path_factory):
    """What the tiny model writes after the beginnings of sentences."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [line[:12] for line in fable(60, seed=9).splitlines()]
    lines = [json.dumps({"prompt": prompt, "category": "fable"}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines))
    code = distill([*model_and_prompts(trained_folder, folder), "--out", str(folder / "answers.jsonl")])
    assert code == 0
    return folder / "answers.jsonl"


def model_and_prompts(model, folder):
    arguments = ["--model", str(model), "--prompts", str(folder / "prompts.jsonl"), "--raw"]
    return [*arguments, "--max-new-tokens", "40", "--batch-size", "16", "--temperature", "0.6", "--top-p", "0.95"]


def read(path):
    return {line["line"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.exhaustive
def test_answers_are_what_the_model_generates(trained_model, answers):
    lm, found = trained_model, read(answers)
    assert len(found) == 60
    sampling = [jaxinfer.SamplingParams(temperature=0.6, top_p=0.95, seed=line) for line in (1, 33)]
    prompts = [found[line]["prompt_tokens"] for line in (1, 33)]
    for line, result in zip((1, 33), lm.generate(prompts, max_new_tokens=40, sampling=sampling)):
        assert (tuple(found[line]["tokens"]), found[line]["text"]) == (result.tokens, result.text)
        assert found[line]["category"] == "fable"


@pytest.mark.slow
def test_generation_goes_on_where_it_was_killed(trained_folder, answers, tmp_path, capsys):
    """From whole lines; the half one is made again, and every answer is what it would have been."""
    lines = answers.read_text().splitlines(keepends=True)
    part = tmp_path / "answers.jsonl"
    part.write_text("".join(lines[:48]) + lines[48][:30])
    arguments = model_and_prompts(trained_folder, answers.parent)
    assert distill([*arguments, "--out", str(part)]) == 0
    assert read(part) == read(answers)
    assert part.read_text().splitlines(keepends=True)[:48] == lines[:48]
    assert distill([*arguments[:-1], "0.9", "--out", str(part)]) == 2
    assert "line 1: was made by another model or other options" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    assert distill([*model_and_prompts(trained_folder, tmp_path), "--out", str(part)]) == 2
    assert "answers none of these prompts" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(trained_folder, answers, tmp_path_factory):
    """The folder of a short run; the base that was trained on, and its parameters as they were before."""
    out, loaded = tmp_path_factory.mktemp("heads") / "run", []

    def load(*arguments, **options):
        lm = jaxinfer.load(*arguments, **options)
        loaded.append((lm, jax.tree.map(np.array, lm.params)))
        return lm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "load", load)
        same = ("--model", trained_folder, "--data", answers, "--out", out)
        assert train_heads(*same, *HEADS, *OPTIONS, "--epochs", EPOCHS) == 0
    ((lm, before),) = loaded
    return out, lm, before


@pytest.fixture(scope="module")
def run(trained):
    return trained[0]


def draft_with(lm, run):
    """Return the tokens a step on sentences of another seed than those in training; no token may change."""
    strategy = f"medusa:heads={run / 'heads'},tree=own"
    assert len(lm.resolve(strategy).paths) == 15
    prompts = [line[:9] for line in fable(4, seed=77).splitlines()]
    plain, drafted = (lm.generate(prompts, max_new_tokens=40, strategy=one) for one in ("autoregressive", strategy))
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    return sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted)


def losses(run):
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
def test_exported_heads_draft_and_change_no_token(trained, trained_model):
    """With the tree that they come with; their card says what they were trained on and how well they foresee."""
    run, lm, _ = trained
    assert draft_with(trained_model, run) > 1.1
    card = (run / "heads" / "README.md").read_text()
    accuracies = json.loads((run / "heads" / "accuracies.json").read_text())
    assert np.sum(accuracies) > 0.5
    assert f"fingerprint `{fingerprint(lm.params)}`" in card
    assert f"| 1 | {100 * accuracies[0][0]:.1f}% |" in card
    assert json.loads((run / "heads" / "heads.json").read_text())["base_fingerprint"] == fingerprint(lm.params)
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def on_few_bits(tiny_llama_folder, answers, tmp_path_factory):
    """The folder of a run on a base in few bits, and the base before it was rounded and after."""
    folder, out = tiny_llama_folder(vocab_size=258), tmp_path_factory.mktemp("few_bits") / "run"
    same = ("--model", folder, "--data", answers, "--out", out, "--weights", "nf4:group=32", "--draft-vocab", 60)
    assert train_heads(*same, "--heads", 2, *OPTIONS, "--epochs", 1, "--learning-rate", 1e-2) == 0
    return out, [jaxinfer.load(folder, weights=weights) for weights in (None, "nf4:group=32")]


@pytest.mark.slow
def test_heads_are_trained_on_a_base_in_few_bits(on_few_bits):
    """They are for the weights before they were rounded and for those after."""
    out, (plain, rounded) = on_few_bits
    assert losses(out)[-1] < losses(out)[0]
    description = json.loads((out / "heads" / "heads.json").read_text())
    assert description["base_fingerprint"] == plain.fingerprint == rounded.base_fingerprint != rounded.fingerprint


@pytest.mark.exhaustive
def test_heads_draft_for_the_base_that_they_were_trained_on_and_the_one_before(on_few_bits):
    out, models = on_few_bits
    for lm in models:
        draft_with(lm, out)


@pytest.mark.slow
def test_a_base_in_few_bits_is_not_trained(tiny_llama_folder, answers, tmp_path, capsys):
    same = ("--model", tiny_llama_folder(), "--data", answers, "--out", tmp_path / "run", "--weights", "int8")
    assert train_heads(*same, "--joint", "two-stage") == 2
    assert "--weights belongs to training on a frozen base: leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_training_lowers_the_loss_and_records_it(run):
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"head_0_top1", "head_2_loss", "gradient_norm", "tokens_per_second"} <= lines[0].keys()


def test_the_base_is_bit_identical_after_training(trained):
    """The very arrays that were trained on, not those of a file."""
    _, lm, before = trained
    same_tree(lm.params, before)


@pytest.mark.slow
def test_a_run_that_lost_its_last_steps_ends_as_it_would_have(trained_folder, answers, run, tmp_path):
    """From the checkpoint before the last, by the states that are on the disk: in the order of the steps."""
    copied = shutil.copytree(run, tmp_path / "run")
    steps = sorted(int(folder.name) for folder in (copied / "checkpoints").iterdir())
    shutil.rmtree(copied / "checkpoints" / str(steps[-1]))
    shutil.rmtree(copied / "heads")
    same = ("--model", trained_folder, "--data", answers, "--out", copied)
    assert train_heads(*same, *HEADS, *OPTIONS, "--epochs", EPOCHS) == 0
    for name in ("heads.safetensors", "accuracies.json", "tree.json"):
        assert (copied / "heads" / name).read_bytes() == (run / "heads" / name).read_bytes()
    assert losses(copied) == losses(run)


@pytest.mark.exhaustive
def test_heads_that_were_trained_longer_draft_well(trained_folder, answers, tmp_path):
    out = tmp_path / "run"
    same = ("--model", trained_folder, "--data", answers, "--out", out)
    assert train_heads(*same, *HEADS, *OPTIONS, "--eval-every", 40, "--epochs", 40) == 0
    assert draft_with(jaxinfer.load(trained_folder), out) > 1.8
    assert losses(out)[-1] < 0.6 * losses(out)[0]


@pytest.mark.exhaustive
def test_the_base_is_bit_identical_after_training_by_soft_targets(trained_folder, answers, tmp_path, monkeypatch):
    loaded = []

    def load(*arguments, **options):
        lm = jaxinfer.load(*arguments, **options)
        loaded.append((lm, jax.tree.map(np.array, lm.params)))
        return lm

    monkeypatch.setattr(shared, "load", load)
    options = ("--model", trained_folder, "--data", answers, "--out", tmp_path / "run", "--heads", 2, "--epochs", 1)
    assert train_heads(*options, *OPTIONS, "--soft-targets", 0.5) == 0
    ((lm, before),) = loaded
    same_tree(lm.params, before)


def test_a_dry_run_says_what_a_run_takes_and_makes_nothing(trained_folder, answers, tmp_path, capsys):
    out = tmp_path / "run"
    options = ("--model", trained_folder, "--data", answers, "--out", out, "--heads", 2, "--share-lm-head")
    assert train_heads(*options, *OPTIONS, "--dry-run") == 0
    lines = capsys.readouterr().out
    assert "parameters: 4,704 trained, " in lines
    assert "memory of a step: " in lines
    assert "GFLOP a step" in lines
    assert not out.exists()


@pytest.mark.slow
def test_mistakes_end_in_one_line(trained_folder, answers, run, tiny_llama_folder, tmp_path, capsys):
    other = tiny_llama_folder()
    same = ("--model", trained_folder, "--data", answers)
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"prompt_tokens": [5], "tokens": [400, 6]}\n')
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n\n')
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": "x" * 2000}) + "\n")
    cases = {
        "holds a run with base": ("--model", other, "--data", answers, "--out", run, *HEADS, "--epochs", EPOCHS),
        "holds a run with epochs 1.5, not 3.0": (*same, "--out", run, *HEADS, "--epochs", 3),
        "holds hidden states with base": (
            *("--model", other, "--data", answers, "--out", tmp_path / "a", "--cache", run / "hidden_states"),
        ),
        "holds token id 400, but the base has 258": (
            *("--model", trained_folder, "--data", foreign, "--out", tmp_path / "b"),
        ),
        f"{broken}, line 2: an empty line": ("--model", trained_folder, "--data", broken, "--out", tmp_path / "c"),
        f"{long}, line 1: the text has 2000 tokens, but there is room for 1024": (
            *("--model", trained_folder, "--data", long, "--out", tmp_path / "d"),
        ),
        "does not split into 3 parts": (*same, "--out", tmp_path / "e", "--microbatches", 3),
        "mesh data=64 is of 64 devices": (*same, "--out", tmp_path / "f", "--mesh", "data=64"),
        "no such file": ("--data", tmp_path / "none", "--out", tmp_path / "g"),
        "'two' is not a whole number of 1 or more": (*same, "--out", tmp_path / "h", "--heads", "two"),
        "no such file or directory": (*same, "--out", tmp_path / "no" / "such", "--cache", tmp_path / "nor" / "this"),
    }
    for complaint, arguments in cases.items():
        assert train_heads(*arguments, *OPTIONS) == 2, complaint
        errors = capsys.readouterr().err
        if complaint != "no such file or directory":
            assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1


MESH = """
import sys
from train import arguments as shared
from train import medusa
from train.command import run_command
for mesh, parts in (("data=1", "1"), ("data=2", "2"), ("data=1,tensor=2", "1")):
    arguments = [*sys.argv[2:], "--out", f"{sys.argv[1]}/{mesh}", "--cache", f"{sys.argv[1]}/states"]
    arguments += ["--mesh", mesh, "--microbatches", parts]
    assert run_command("medusa", "", medusa.add_arguments, medusa.run, arguments) == 0
"""


@pytest.mark.exhaustive
def test_a_mesh_changes_nothing_but_rounding(trained_folder, answers, tmp_path):
    """Batches split over two devices and in two parts, and the base's matrices over two, against one of each."""
    environment = {**os.environ, **several(2)}
    options = ("--model", trained_folder, "--data", answers, "--heads", 2, "--share-lm-head", "--epochs", 1, *OPTIONS)
    command = [sys.executable, "-c", MESH, str(tmp_path), *map(str, options)]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], check=True, stderr=subprocess.DEVNULL)
    plain, *split = (
        [line["loss"] for line in read_metrics(tmp_path / mesh / "metrics.jsonl") if "loss" in line]
        for mesh in ("data=1", "data=2", "data=1,tensor=2")
    )
    assert len(plain) >= 2
    for losses in split:
        np.testing.assert_allclose(losses, plain, rtol=1e-4)
