"""`jaxinfer bench sparsity` counts what is zero, and what a step does not read."""

import json

import numpy as np
import pytest

from jaxinfer import load
from jaxinfer.bench.sparsity.measure import measure_sparsity, skipped_share
from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.bench.sparsity.table import sparsity_lines
from jaxinfer.cli.main import main
from jaxinfer.models.active_columns import COLUMNS
from tests.toys import encode_bytes, fable


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder(activation="relu")


def test_weights_are_not_read_where_leaving_them_out_pays(folder):
    """Of few rows, in the layers that need few features: of their up and down projections."""
    lm = load(folder, sparsity="exact")
    total = sum(leaf.nbytes for leaf in _leaves(lm.params) if leaf is not lm.params["embed"]["embedding"])
    assert skipped_share(lm, [0.25, 0.9], (2, 4)) == pytest.approx(2 * 32 * 64 * 4 * 0.75 / total)
    assert skipped_share(lm, [0.25, 0.25], (65, 1)) == 0


@pytest.mark.exhaustive
def test_shares_are_those_of_the_activations_and_weights_those_of_the_shares(folder):
    lm = load(folder, sparsity="topk:8")
    tokens = encode_bytes(fable(2))[:40]
    active = active_features(lm, tokens)
    assert [active_TF.shape for active_TF in active] == [(40, 64)] * 2
    # Never more than K features of a token, and fewer where ReLU leaves fewer.
    assert all(0 < active_TF.sum(axis=1).max() <= 8 for active_TF in active)
    report = measure_sparsity("toy", lm, tokens, [(1, 1), (1, 24), (70, 1)], repeats=1)
    for layer, active_TF in zip(report.layers, active, strict=True):
        assert layer.zeros == pytest.approx(1 - active_TF.mean())
        # Nodes come after sixteen tokens; sequences begin all over the text.
        of_nodes = active_TF[16:40].any(axis=0).mean()
        assert layer.needed[:2] == pytest.approx((active_TF[16].mean(), of_nodes))
        assert layer.needed[2] == pytest.approx(active_TF[16:].any(axis=0).mean())
    total = sum(leaf.nbytes for leaf in _leaves(lm.params) if leaf is not lm.params["embed"]["embedding"])
    kernels = 2 * 32 * 64 * 4
    unread = sum(kernels * (1 - layer.needed[0]) for layer in report.layers)
    assert report.steps[0].skipped == pytest.approx(unread / total)
    # Where most features are needed, and with so many rows, everything is read.
    assert min(layer.needed[1] for layer in report.layers) > 0.5
    assert report.steps[1].skipped == 0
    assert report.steps[2].skipped == 0
    assert all(step.dense_seconds > 0 and step.sparse_seconds > 0 for step in report.steps)
    assert COLUMNS in lm.adapted_params["blocks"]["layer_0"]["mlp"]["down"]
    lines = sparsity_lines(report)
    assert lines[2].split() == ["layer", "zeros", "needed", "by", "1x1", "needed", "by", "1x24", "needed", "by", "70x1"]
    mean = np.mean([layer.zeros for layer in report.layers])
    assert lines[5].split()[:2] == ["mean", f"{mean:.1%}"]


@pytest.mark.exhaustive
def test_the_command_prints_one_object(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(fable(4))
    given = ["bench", "sparsity", "--model", str(folder), "--text", str(tmp_path / "text.txt"), "--repeats", "1"]
    given += ["--batch", "1", "--nodes", "1,2", "--json"]
    assert main([*given, "--sparsity", "exact"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sparsity"] == "exact"
    assert [(step["batch"], step["nodes"]) for step in found["steps"]] == [(1, 1), (1, 2)]


def test_mistakes_end_in_one_line(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("short")
    given = ["bench", "sparsity", "--model", str(folder), "--text", str(tmp_path / "text.txt")]
    for more, message in (([], "give --sparsity exact"), (["--sparsity", "exact"], "these steps need 32 tokens")):
        assert main([*given, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith("error: ")
        assert message in line


def _leaves(node):
    for value in node.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value
