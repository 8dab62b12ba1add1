"""From a base model to an EAGLE-3 drafter that drafts for it: the command as a user runs it, on a tiny model."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.models.fingerprint import fingerprint
from tests.parallel.devices import several
from tests.toys import fable
from train.command import run_command
from train.eagle import __main__ as eagle
from train.loop.fit import read_metrics

DRAFTER = ("--steps", 3, "--draft-vocab", 60, "--row-length", 96, "--batch-size", 4, "--learning-rate", 5e-3)
OPTIONS = ("--held-out", 0.1, "--eval-every", 20, "--save-every", 20, "--epochs", 8)


def train_eagle(*arguments):
    return run_command("eagle", "", eagle.add_arguments, eagle.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Sentences as the tiny model learned them."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in fable(60, seed=9).splitlines()))
    return path


@pytest.fixture(scope="module")
def run(trained_folder, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("eagle") / "run"
    assert train_eagle("--model", trained_folder, "--data", texts, "--out", out, *DRAFTER, *OPTIONS) == 0
    return out


def tokens_a_step(lm, folder):
    """Return the tokens a step on sentences of another seed than those in training; no token may change."""
    prompts = [line[:9] for line in fable(4, seed=77).splitlines()]
    specs = ("autoregressive", f"eagle:heads={folder},tree=dynamic:8,depth=3")
    plain, drafted = (lm.generate(prompts, max_new_tokens=40, strategy=one) for one in specs)
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    return sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted)


@pytest.mark.exhaustive
def test_a_drafter_that_was_trained_for_seconds_drafts_much_better_than_an_untrained_one(trained_model, run, tmp_path):
    found = load_file(run / "drafter" / "model.safetensors")
    rng = np.random.default_rng(0)
    random = shutil.copytree(run / "drafter", tmp_path / "random")
    names = [name for name in found if name.endswith("weight") and "norm" not in name]
    drawn = {name: (rng.standard_normal(found[name].shape) * 0.1).astype(found[name].dtype) for name in names}
    save_file({**found, **drawn}, random / "model.safetensors")
    trained = tokens_a_step(trained_model, run / "drafter")
    assert trained > 1.5
    assert trained > 1.4 * tokens_a_step(trained_model, random)


@pytest.mark.slow
def test_the_folder_has_the_published_layout_and_says_what_it_is_for(trained_model, run):
    settings = json.loads((run / "drafter" / "config.json").read_text())
    found = load_file(run / "drafter" / "model.safetensors")
    assert settings["base_fingerprint"] == fingerprint(trained_model.params)
    assert (settings["draft_vocab_size"], settings["vocab_size"]) == (60, trained_model.config.vocab_size)
    ids = np.arange(60) + found["d2t"]
    assert np.flatnonzero(found["t2d"]).tolist() == ids.tolist()
    assert found["lm_head.weight"].shape == (60, trained_model.config.model_dim)
    assert {
        "fc.weight",
        "norm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.self_attn.q_proj.weight",
    } <= found.keys()
    card = (run / "drafter" / "README.md").read_text()
    accuracies = json.loads((run / "drafter" / "accuracies.json").read_text())
    assert f"| 1 | {100 * accuracies[0][0]:.1f}% |" in card
    assert len(trained_model.resolve(f"eagle:heads={run / 'drafter'},tree=own").paths) == 15


@pytest.mark.slow
def test_training_lowers_the_loss_and_raises_every_steps_accuracy(run):
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    for step in range(3):
        assert lines[-1][f"step_{step}_top1"] > lines[0][f"step_{step}_top1"]


@pytest.mark.exhaustive
def test_a_run_that_lost_its_last_steps_ends_as_it_would_have(trained_folder, texts, run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    steps = sorted(int(folder.name) for folder in (copied / "checkpoints").iterdir())
    shutil.rmtree(copied / "checkpoints" / str(steps[-1]))
    shutil.rmtree(copied / "drafter")
    assert train_eagle("--model", trained_folder, "--data", texts, "--out", copied, *DRAFTER, *OPTIONS) == 0
    for name in ("model.safetensors", "accuracies.json", "tree.json"):
        assert (copied / "drafter" / name).read_bytes() == (run / "drafter" / name).read_bytes()


@pytest.mark.exhaustive
def test_training_goes_on_with_a_drafter_and_computes_features_in_its_steps(trained_folder, texts, run, tmp_path):
    """It begins as good as the other ended, and keeps its draft vocabulary."""
    options = ("--steps", 3, "--row-length", 96, "--batch-size", 4, "--online", "--epochs", 1, "--eval-every", 3)
    same = ("--model", trained_folder, "--data", texts, "--out", tmp_path / "run", "--held-out", 0.1)
    assert train_eagle(*same, *options, "--init", run / "drafter", "--learning-rate", 1e-6) == 0
    assert not (tmp_path / "run" / "hidden_states").exists()
    card = (tmp_path / "run" / "drafter" / "README.md").read_text()
    assert re.search(r"^It went on from a drafter .*^\* init: [0-9a-f]{12}$", card, re.M | re.S)
    before, after = (json.loads((each / "drafter" / "accuracies.json").read_text()) for each in (run, tmp_path / "run"))
    np.testing.assert_allclose(np.array(before)[:, 0], np.array(after)[:, 0], atol=0.05)


@pytest.mark.slow
def test_a_drafter_without_an_output_matrix_goes_on_with_other_tokens(
    trained_model, trained_folder, texts, run, tmp_path, capsys
):
    """It begins with few tokens, guesses more with more of them, and is refused where the rows are its own."""
    same = ("--model", trained_folder, "--data", texts, "--held-out", 0.1, *DRAFTER[:2], *DRAFTER[4:], "--epochs", 1)
    few, more, all_of_them = tmp_path / "few", tmp_path / "more", tmp_path / "all"
    features = ("--cache", tmp_path / "features")
    assert train_eagle(*same, *features, "--out", few, "--draft-vocab", 12, "--share-lm-head") == 0
    for out, size in ((more, 60), (all_of_them, 10**6)):
        assert train_eagle(*same, *features, "--out", out, "--init", few / "drafter", "--draft-vocab", size) == 0
    begun, found = (load_file(folder / "drafter" / "model.safetensors") for folder in (few, more))
    ids, other = (set((np.arange(len(one["d2t"])) + one["d2t"]).tolist()) for one in (begun, found))
    assert (len(ids), len(other)) == (12, 60)
    assert ids < other
    assert "lm_head.weight" not in found
    whole = load_file(all_of_them / "drafter" / "model.safetensors")["d2t"]
    assert (len(whole), np.abs(whole).max()) == (trained_model.config.vocab_size, 0)
    first, *later = (  # the share of places where the right token is among the best four
        sum(json.loads((folder / "drafter" / "accuracies.json").read_text())[0][:4])
        for folder in (few, more, all_of_them)
    )
    assert all(one > first + 0.1 for one in later)
    assert "* share_lm_head: True\n" in (more / "drafter" / "README.md").read_text()
    capsys.readouterr()
    assert train_eagle(*same, *features, "--out", more, "--init", all_of_them / "drafter", "--draft-vocab", 60) == 2
    assert "holds a run with init" in capsys.readouterr().err
    own = ("--out", tmp_path / "none", "--init", run / "drafter", "--draft-vocab", 40)
    assert train_eagle(*same, *features, *own) == 2
    assert "has an output matrix for its own tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--online", "--cache", "x"), "--cache belongs to features on disk"),
        (("--init", "nowhere"), "no such folder of an EAGLE drafter"),
        (("--init", "nowhere", "--share-lm-head"), "--share-lm-head belongs to a new drafter"),
    ],
)
def test_options_that_do_not_go_together_are_refused(trained_folder, texts, tmp_path, capsys, options, message):
    assert train_eagle("--model", trained_folder, "--data", texts, "--out", tmp_path / "run", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_dry_run_prints_what_a_run_takes(trained_folder, trained_model, texts, tmp_path, capsys):
    assert train_eagle("--model", trained_folder, "--data", texts, "--out", tmp_path / "run", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "parameters" in said
    # At least the MLP's, of 8 rows of 512 tokens in five steps, forwards and for the gradients of inputs and weights.
    mlp = 3 * trained_model.config.model_dim * trained_model.config.ffn_dim
    least = 2 * 8 * 512 * 5 * 3 * mlp / 1e9
    assert least < float(re.search(r"operations: ([\d.]+) GFLOP a step", said)[1]) < 10 * least
    assert not (tmp_path / "run").exists()


MESH = """
import sys
from tests.train.eagle.test_eagle import train_eagle
for mesh, parts in (("data=1", 1), ("data=2", 2)):
    arguments = [*sys.argv[2:], "--out", f"{sys.argv[1]}/{mesh}", "--cache", f"{sys.argv[1]}/states"]
    assert train_eagle(*arguments, "--mesh", mesh, "--microbatches", parts) == 0
"""


@pytest.mark.slow
def test_a_mesh_changes_nothing_but_rounding(trained_folder, texts, tmp_path):
    """Batches split over two devices and in two parts, against one of each."""
    options = (*DRAFTER, "--share-lm-head", "--held-out", 0.1, "--eval-every", 20, "--epochs", 6)
    command = [sys.executable, "-c", MESH, str(tmp_path), "--model", trained_folder, "--data", texts, *options]
    environment, folder = {**os.environ, **several(2)}, Path(__file__).parents[3]
    told = subprocess.run(
        list(map(str, command)), env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert told.returncode == 0, told.stderr[-2000:]
    plain, split = (
        [line for line in read_metrics(tmp_path / mesh / "metrics.jsonl") if "loss" in line]
        for mesh in ("data=1", "data=2")
    )
    assert len(plain) >= 3
    for one, other in zip(plain, split, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=2e-3)
        for name in (name for name in one if "top1" in name):
            np.testing.assert_allclose(one[name], other[name], atol=0.02)
    ranks, others = (
        json.loads((tmp_path / mesh / "drafter" / "accuracies.json").read_text()) for mesh in ("data=1", "data=2")
    )
    np.testing.assert_allclose(ranks, others, atol=0.03)
