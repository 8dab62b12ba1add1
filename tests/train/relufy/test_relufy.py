"""A model that is trained with ReLU says more nearly what it said than one that ReLU is put into."""

import numpy as np
import pytest

import jaxinfer
from jaxinfer.bench.sparsity.shares import active_features
from tests.toys import BEGIN, encode_bytes, fable
from tests.train.fables import write_fables
from train.command import run_command
from train.loop.fit import read_metrics
from train.relufy import __main__ as relufy

OPTIONS = ("--length", 64, "--batch-size", 4, "--eval-every", 10, "--learning-rate", 2e-3, "--held-out", 0.2)


def train(*arguments) -> int:
    return run_command("relufy", "", relufy.add_arguments, relufy.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_fables(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_what_is_written_has_relu_and_is_nearer_to_the_teacher(folder, data, tmp_path):
    """And leaves out what training left out."""
    given = ("--model", folder, "--data", data, *OPTIONS, "--epochs", 4, "--save-every", 10, "--threshold", 0.1)
    assert train(*given, "--out", tmp_path / "run") == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    (divergences,) = (line.split("|")[2:4] for line in card.splitlines() if line.startswith("| KL"))
    before, after = map(float, divergences)
    assert after < 0.7 * before
    found = [line["evaluation"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "evaluation" in line]
    assert min(line["divergence"] for line in found) == pytest.approx(after, abs=1e-4)

    lm = jaxinfer.load(tmp_path / "run" / "model", sparsity="threshold:0.1")
    assert lm.config.activation == "relu"
    text = [BEGIN, *encode_bytes(fable(2, 99))][:48]
    shares = [active_TF.mean() for active_TF in active_features(lm, text)]
    plain = [active_TF.mean() for active_TF in active_features(jaxinfer.load(tmp_path / "run" / "model"), text)]
    assert all(0 < share < whole < 1 for share, whole in zip(shares, plain))
    assert "| features that are zero | |" in card
    assert np.mean(shares) < 0.6
    # Of 64 features, which are one block.
    assert "| live blocks of 128 features a token, as trained and as written, in order | 100.0% | 100.0% |" in card


def test_mistakes_end_in_one_line(folder, data, tmp_path, capsys):
    for arguments, message in (
        (("--threshold", "-1"), "--threshold"),
        (("--batch-size", 3, "--microbatches", 2), "split"),
    ):
        given = ("--model", folder, "--data", data, "--out", tmp_path / "run", *arguments)
        assert train(*given) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
