"""A model that is trained for few bits is nearer to itself than a rounded one, and is saved as it was trained."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.ops.few_bits.formats import INT8, int4
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import nearest_values
from tests.toys import BEGIN, encode_bytes, fable
from tests.train.fables import write_fables
from train.command import run_command
from train.distill import own_teacher
from train.loop.fit import read_metrics
from train.qat import __main__ as qat
from train.qat.rounding import rounded, straight_through

FORM = "int4:group=32,symmetric=yes"
OPTIONS = ("--length", 64, "--batch-size", 4, "--eval-every", 10, "--learning-rate", 2e-3, "--held-out", 0.2)


def train(*arguments) -> int:
    return run_command("qat", "", qat.add_arguments, qat.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def folder(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_fables(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(folder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("qat") / "run"
    given = ("--model", folder, "--weights", FORM, "--data", data, *OPTIONS)
    assert train(*given, "--epochs", 4, "--save-every", 10, "--out", out) == 0
    return out


def test_rounding_in_a_forward_pass_is_that_of_few_bits_and_gradients_pass_it(folder):
    lm = jaxinfer.load(folder, scan_layers=True)
    found = rounded(lm.params, int4(32, True))
    kernel = lm.params["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(found["blocks"]["mlp"]["up"]["kernel"], nearest_values(kernel, int4(32, True)))
    np.testing.assert_array_equal(found["embed"]["embedding"], nearest_values(lm.params["embed"]["embedding"], INT8))
    in_groups = replace(INT8, group=32)
    tables = (each["embed"]["embedding"] for each in (rounded(lm.params, in_groups), lm.params))
    np.testing.assert_array_equal(next(tables), nearest_values(next(tables), in_groups))
    assert found["final_norm"]["scale"] is lm.params["final_norm"]["scale"]
    weights, factors = jax.random.normal(jax.random.key(0), (2, 4, 64))
    gradient = jax.grad(lambda one: jnp.sum(straight_through(one, int4(32, True)) * factors))(weights)
    np.testing.assert_array_equal(gradient, factors)


@pytest.mark.slow
def test_what_is_written_is_nearer_to_the_teacher_than_what_is_rounded(folder, run):
    """And holds the codes that the last evaluation computed with."""
    lines = [line["evaluation"] for line in read_metrics(run / "metrics.jsonl") if "evaluation" in line]
    teacher, trained = jaxinfer.load(folder), jaxinfer.load(run / "model")
    plainly = jaxinfer.load(folder, weights=FORM)
    texts = [[BEGIN, *encode_bytes(line)] for line in fable(4, 99).splitlines()[:4]]
    divergences = []
    for lm in (plainly, trained):
        parts = []
        for text in texts:
            known, found = (jax.nn.log_softmax(jnp.asarray(each.logits([text])[0])) for each in (teacher, lm))
            parts.append(float(jnp.mean(jnp.sum(jnp.exp(known) * (known - found), axis=-1))))
        divergences.append(np.mean(parts))
    assert divergences[1] < 0.7 * divergences[0]
    assert len(lines) > 1
    assert trained.base_fingerprint == teacher.fingerprint
    kernels = [leaf for leaf in jax.tree.leaves(trained.params, is_leaf=is_quantized) if is_quantized(leaf)]
    assert {leaf.form for leaf in kernels} == {int4(32, True), INT8}
    card = (run / "model" / "README.md").read_text()
    assert f"| {min(line['divergence'] for line in lines):.4f} |" in card


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_to_the_same_codes(folder, data, run, tmp_path, monkeypatch):
    given = ("--model", folder, "--weights", FORM, "--data", data, *OPTIONS)
    given = (*given, "--epochs", 4, "--save-every", 10, "--out", tmp_path / "run")
    place, calls = own_teacher.place_batch, []

    def stop(batch, mesh):
        calls.append(batch)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return place(batch, mesh)

    monkeypatch.setattr(own_teacher, "place_batch", stop)
    assert train(*given) == 130
    assert not (tmp_path / "run" / "model").exists()
    monkeypatch.setattr(own_teacher, "place_batch", place)
    assert train(*given) == 0
    assert train(*given) == 0  # and once more, over what is there
    one, other = (jaxinfer.load(folder / "model").params for folder in (run, tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_a_dry_run_makes_nothing(folder, data, tmp_path, capsys):
    given = ("--model", folder, "--weights", "int8", "--data", data, *OPTIONS)
    assert train(*given, "--out", tmp_path / "run", "--dry-run") == 0
    assert "memory of a step: " in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("gguf", "gguf is no form to round to"),
        ("int3", "unknown weights 'int3'"),
        ("int4:group=128", "do not divide into groups of 128"),
    ],
)
def test_mistakes_end_in_one_line(folder, data, tmp_path, capsys, weights, message):
    given = ("--model", folder, "--weights", weights, "--data", data, "--out", tmp_path / "run")
    assert train(*given) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()
