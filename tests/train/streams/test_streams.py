"""From a base model to streams that draft for it: the command as a user runs it, on a tiny model."""

import json
import shutil

import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import InvalidCheckpoint
from tests.toys import encode_bytes, fable
from train import medusa
from train.command import run_command
from train.loop.fit import read_metrics
from train.streams import __main__ as streams

OPTIONS = ["--layers", "1", "--adapter-rank", "4", "--rank", "16", "--streams", "2", "--row-length", "128"]
OPTIONS += ["--batch-size", "4", "--positions", "48", "--held-out", "0.1", "--eval-every", "10", "--seed", "3"]
RUN = (*OPTIONS, "--epochs", 2, "--learning-rate", 1e-2, "--save-every", 10)
PROMPTS = [line[:9] for line in fable(4, seed=77).splitlines()]


def train_streams(*arguments):
    return run_command("streams", "", streams.add_arguments, streams.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Sentences as the toy model writes them, after their first letters."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    lines = [encode_bytes(line + "\n") for line in fable(120, seed=9).splitlines()]
    path.write_text("".join(json.dumps({"prompt_tokens": one[:5], "tokens": one[5:]}) + "\n" for one in lines))
    return path


@pytest.fixture(scope="module")
def run(trained_folder, answers, tmp_path_factory):
    out = tmp_path_factory.mktemp("streams") / "run"
    same = ("--model", trained_folder, "--data", answers, "--out", out)
    assert train_streams(*same, *RUN) == 0
    return out


def tokens_per_step(lm, strategy):
    """On sentences of another seed than those in training; no token may change."""
    plain, drafted = (lm.generate(PROMPTS, max_new_tokens=40, strategy=one) for one in ("autoregressive", strategy))
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    return sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted)


@pytest.mark.exhaustive
def test_streams_that_were_trained_longer_draft_well(trained_folder, answers, tmp_path):
    same = ("--model", trained_folder, "--data", answers, "--out", tmp_path / "run")
    longer = (*OPTIONS, "--eval-every", 60, "--epochs", 40, "--learning-rate", 1e-2)
    assert train_streams(*same, *longer) == 0
    lm = jaxinfer.load(trained_folder)
    assert tokens_per_step(lm, f"streams:heads={tmp_path / 'run' / 'streams'},tree=own") > 1.3
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    for name in ("exit_loss", "stream_1_loss", "stream_2_loss"):
        assert lines[-1][name] < 0.7 * lines[0][name]


@pytest.mark.slow
def test_exported_streams_come_with_a_tree_and_a_card_and_are_for_their_base(trained_model, run):
    """The card says what they were trained on and how well they foresee."""
    lm = trained_model
    strategy = lm.resolve(f"streams:heads={run / 'streams'},tree=own")
    assert len(strategy.paths) == 15
    description = json.loads((run / "streams" / "streams.json").read_text())
    assert (description["base_fingerprint"], description["adapter_rank"]) == (lm.fingerprint, 4)
    card = (run / "streams" / "README.md").read_text()
    accuracies = json.loads((run / "streams" / "accuracies.json").read_text())
    assert f"fingerprint `{lm.fingerprint}`; it was frozen." in card
    assert f"| 2 | {100 * accuracies[1][0]:.1f}% |" in card
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_training_lowers_the_losses_and_records_them(run):
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    for name in ("exit_loss", "stream_1_loss", "stream_2_loss"):
        assert lines[-1][name] < lines[0][name]
    assert {"exit_top1", "stream_2_top1", "gradient_norm", "tokens_per_second"} <= lines[0].keys()


@pytest.mark.exhaustive
def test_streams_are_trained_through_the_layers_of_a_base_in_few_bits(tiny_llama_folder, answers, tmp_path):
    folder, out = tiny_llama_folder(vocab_size=258), tmp_path / "run"
    same = ("--model", folder, "--data", answers, "--out", out, "--weights", "int4:group=32")
    assert train_streams(*same, *OPTIONS, "--epochs", 3, "--learning-rate", 1e-2) == 0
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    tokens_per_step(jaxinfer.load(folder, weights="int4:group=32"), f"streams:heads={out / 'streams'}")


@pytest.mark.exhaustive
def test_a_run_that_lost_its_last_steps_ends_as_it_would_have(trained_folder, answers, run, tmp_path):
    """From the checkpoint before the last: the picks and the order of the rows are those of the steps."""
    copied = shutil.copytree(run, tmp_path / "run")
    steps = sorted(int(folder.name) for folder in (copied / "checkpoints").iterdir())
    shutil.rmtree(copied / "checkpoints" / str(steps[-1]))
    shutil.rmtree(copied / "streams")
    same = ("--model", trained_folder, "--data", answers, "--out", copied)
    assert train_streams(*same, *RUN) == 0
    for name in ("streams.safetensors", "accuracies.json", "tree.json"):
        assert (copied / "streams" / name).read_bytes() == (run / "streams" / name).read_bytes()
    drop = ("tokens_per_second",)
    before, after = (
        [{key: value for key, value in line.items() if key not in drop} for line in read_metrics(path)]
        for path in (run / "metrics.jsonl", copied / "metrics.jsonl")
    )
    assert after == before


@pytest.mark.exhaustive
def test_joint_training_makes_another_model_and_streams_for_it_alone(trained_folder, answers, tmp_path):
    options = ("--joint", "--lora-rank", 2, "--epochs", 3, "--soft-targets", 0.5, "--loss-vocab", 60)
    out = tmp_path / "run"
    assert train_streams("--model", trained_folder, "--data", answers, "--out", out, *OPTIONS, *options) == 0
    base, model, folder = (
        jaxinfer.load(trained_folder),
        jaxinfer.load(out / "model"),
        f"streams:heads={out / 'streams'}",
    )
    assert base.fingerprint != model.fingerprint
    plain, drafted = (model.generate(PROMPTS, max_new_tokens=30, strategy=one) for one in ("autoregressive", folder))
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    with pytest.raises(InvalidCheckpoint, match=f"is for the weights {model.fingerprint}, but this model's are"):
        base.resolve(folder)
    # A few steps leave the model able to do what it could.
    text = encode_bytes(fable(1, seed=77))
    losses = [-np.take_along_axis(logs(lm, text), np.array(text[1:])[:, None], 1).mean() for lm in (base, model)]
    assert 0 < abs(losses[1] - losses[0]) < 0.5
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert "main_loss" in lines[0]


def logs(lm, text):
    logits_TV = np.asarray(lm.logits([text]))[0, :-1].astype(np.float64)
    return logits_TV - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))


@pytest.mark.exhaustive
def test_a_dry_run_says_what_a_run_takes_and_makes_nothing(trained_folder, answers, tmp_path, capsys):
    out = tmp_path / "run"
    assert train_streams("--model", trained_folder, "--data", answers, "--out", out, *OPTIONS, "--dry-run") == 0
    lines = capsys.readouterr().out
    # Two identifiers, maps of ranks 16 and 8 on 48 channels, and adapters of kernels with 768 rows and columns in all.
    assert f"parameters: {2 * 48 + 24 * 2 * 48 + 4 * 768:,} trained" in lines
    assert "memory of a step: " in lines
    assert "GFLOP a step" in lines
    assert not out.exists()


@pytest.mark.exhaustive
def test_mistakes_end_in_one_line(trained_folder, answers, run, tmp_path, capsys):
    same = ("--model", trained_folder, "--data", answers)
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt_tokens": [5, 6], "tokens": [7]}\n' * 4)
    cases = {
        "--layers 2 leaves none without streams of the model's 2: take at most 1": (
            *(*same, "--out", tmp_path / "a", *OPTIONS, "--layers", 2),
        ),
        "line 1: the text has 39 tokens, but there is room for 16": (
            *same,
            "--out",
            tmp_path / "b",
            *OPTIONS,
            "--row-length",
            16,
        ),
        "holds a run with epochs 2.0, not 3.0": (
            *(*same, "--out", run, *OPTIONS, "--learning-rate", 1e-2, "--epochs", 3),
        ),
        "holds hidden states with dtype 'float32', not 'bfloat16'": (
            *(*same, "--out", tmp_path / "c", *OPTIONS, "--cache", run / "hidden_states", "--dtype", "bfloat16"),
        ),
        "no text has the three tokens that it takes to train on": (
            *("--model", trained_folder, "--data", short, "--out", tmp_path / "d", "--layers", 1),
        ),
        "'0' is not a number of 1e-09 or more": (*same, "--out", tmp_path / "e", "--alpha", 0),
        "does not split into 3 parts": (*same, "--out", tmp_path / "f", *OPTIONS, "--microbatches", 3),
    }
    for complaint, arguments in cases.items():
        assert train_streams(*arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
    # Heads learn from the states after the last layer.
    arguments = [
        "--model",
        trained_folder,
        "--data",
        answers,
        "--out",
        tmp_path / "g",
        "--cache",
        run / "hidden_states",
    ]
    assert run_command("medusa", "", medusa.add_arguments, medusa.run, list(map(str, arguments))) == 2
    assert "holds hidden states with before_last 1, not None" in capsys.readouterr().err
