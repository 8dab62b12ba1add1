"""From a base model to a drafter of blocks for it: the command as a user runs it, on a tiny model."""

import json
import shutil

import pytest

import jaxinfer
from jaxinfer.errors import InvalidCheckpoint
from tests.toys import encode_bytes, fable
from train.command import run_command
from train.dflash import __main__ as dflash
from train.loop.fit import read_metrics

OPTIONS = ["--layers", "1", "--ffn", "64", "--block-size", "5", "--row-length", "128", "--batch-size", "4"]
OPTIONS += ["--anchors", "24", "--held-out", "0.1", "--eval-every", "20", "--seed", "3", "--mask-token", "4"]
RUN = (*OPTIONS, "--epochs", 5, "--learning-rate", 1e-2, "--save-every", 20)
PROMPTS = [line[:9] for line in fable(4, seed=77).splitlines()]


def train_dflash(*arguments):
    return run_command("dflash", "", dflash.add_arguments, dflash.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Sentences as the toy model writes them, after their first letters."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    lines = [encode_bytes(line + "\n") for line in fable(160, seed=9).splitlines()]
    path.write_text("".join(json.dumps({"prompt_tokens": one[:5], "tokens": one[5:]}) + "\n" for one in lines))
    return path


@pytest.fixture(scope="module")
def run(trained_folder, answers, tmp_path_factory):
    out = tmp_path_factory.mktemp("dflash") / "run"
    assert train_dflash("--model", trained_folder, "--data", answers, "--out", out, *RUN) == 0
    return out


@pytest.mark.exhaustive
def test_a_trained_drafter_drafts_well_and_comes_with_trees_and_a_card(trained_model, run):
    """On sentences of another seed than those in training; no token may change."""
    lm, folder = trained_model, run / "dflash"
    strategy = lm.resolve(f"dflash:heads={folder}")
    assert strategy.max_depth == 4
    plain, drafted = (lm.generate(PROMPTS, max_new_tokens=40, strategy=one) for one in ("autoregressive", strategy))
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    assert sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted) > 1.5
    assert len(lm.resolve(f"dflash:heads={folder},tree=own").paths) == 15
    settings = json.loads((folder / "config.json").read_text())
    assert settings["dflash_config"]["mask_token_id"] == 4
    assert settings["dflash_config"]["base_fingerprint"] == lm.fingerprint
    assert (settings["intermediate_size"], settings["num_target_layers"]) == (64, 2)
    card = (folder / "README.md").read_text()
    accuracies = json.loads((folder / "accuracies.json").read_text())
    assert f"fingerprint `{lm.fingerprint}`; it was frozen." in card
    assert f"| 2 | {100 * accuracies[1][0]:.1f}% |" in card
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    for name in ("place_1_loss", "place_4_loss", "loss"):
        assert lines[-1][name] < lines[0][name]


@pytest.mark.exhaustive
def test_a_run_that_lost_its_last_steps_ends_as_it_would_have(trained_folder, answers, run, tmp_path):
    """From the checkpoint before the last: the anchors and the order of the rows are those of the steps."""
    copied = shutil.copytree(run, tmp_path / "run")
    steps = sorted(int(folder.name) for folder in (copied / "checkpoints").iterdir())
    shutil.rmtree(copied / "checkpoints" / str(steps[-1]))
    shutil.rmtree(copied / "dflash")
    assert train_dflash("--model", trained_folder, "--data", answers, "--out", copied, *RUN) == 0
    for name in ("model.safetensors", "config.json", "accuracies.json", "tree.json"):
        assert (copied / "dflash" / name).read_bytes() == (run / "dflash" / name).read_bytes()


@pytest.mark.exhaustive
def test_soft_targets_and_a_loss_vocabulary_train_a_drafter_of_a_base_in_few_bits(
    tiny_llama_folder, answers, tmp_path, capsys
):
    folder, out = tiny_llama_folder(vocab_size=258), tmp_path / "run"
    same = ("--model", folder, "--data", answers, "--weights", "int4:group=32", *OPTIONS)
    further = ("--soft-targets", 0.5, "--loss-vocab", 90, "--features", 1, "--microbatches", 2, "--gamma", 3)
    assert train_dflash(*same, "--out", out, *further, "--dry-run") == 0
    assert "memory of a step: " in capsys.readouterr().out
    assert not out.exists()
    assert train_dflash(*same, "--out", out, *further, "--epochs", 4, "--learning-rate", 1e-2) == 0
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    drafter = f"dflash:heads={out / 'dflash'}"
    lm = jaxinfer.load(folder, weights="int4:group=32")
    plain, drafted = (lm.generate(PROMPTS, max_new_tokens=20, strategy=one) for one in ("autoregressive", drafter))
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    with pytest.raises(InvalidCheckpoint, match=r"is for the weights .*, but this model's are"):
        jaxinfer.load(tiny_llama_folder(vocab_size=258, seed=9)).resolve(drafter)


@pytest.mark.exhaustive
def test_mistakes_end_in_one_line(trained_folder, answers, run, tmp_path, capsys):
    same = ("--model", trained_folder, "--data", answers)
    cases = {
        "--features 2: the base has the layers 1 to 1 after its first": ("--out", tmp_path / "a", "--features", 1, 2),
        "--mask-token 258: the base has the tokens 0 to 257": ("--out", tmp_path / "b", "--mask-token", 258),
        "line 1: the text has": ("--out", tmp_path / "c", "--row-length", 16),
        "holds a run with epochs 5.0, not 3.0": (*("--out", run, *RUN), "--epochs", 3),
        "'1' is not a whole number from 2 to 64": ("--out", tmp_path / "d", "--block-size", 1),
        "holds hidden states with before_layers [1], not": (
            *("--out", tmp_path / "e", *OPTIONS, "--cache", run / "hidden_states", "--soft-targets", 0.5),
        ),
    }
    for complaint, arguments in cases.items():
        assert train_dflash(*same, *arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
