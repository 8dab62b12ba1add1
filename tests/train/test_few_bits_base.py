"""A model in few bits can be a frozen base, but none of its weights can be trained: that is told at once."""

import pytest

import jaxinfer
from jaxinfer.errors import InvalidOption
from train import medusa
from train.command import run_command
from train.distill import __main__ as distill
from train.layerskip import __main__ as layerskip
from train.qat import __main__ as qat
from train.qat.rounding import parse_form
from train.relufy import __main__ as relufy
from train.streams import __main__ as streams


@pytest.fixture(scope="module")
def folder(tiny_llama_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("few_bits") / "model"
    jaxinfer.load(tiny_llama_folder(), weights="int8").save(out)
    return out


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (medusa, ("--joint", "self-distillation")),
        (streams, ("--joint", "--layers", 1)),
        (layerskip, ()),
        (qat, ("--weights", "int8")),
        (relufy, ()),
        (distill, ("--student-layers", "1")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_weights_in_few_bits_are_not_trained(folder, tmp_path, capsys, module, options):
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c"}\n')
    given = ("--model", folder, "--data", tmp_path / "texts.jsonl", "--out", tmp_path / "run", *options)
    assert run_command("t", "", module.add_arguments, module.run, list(map(str, given))) == 2
    error = capsys.readouterr().err
    assert "its weights are in few bits, which are not trained" in error.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("weights", ["2:4", "blocks:kept=1/2"])
def test_qat_does_not_train_what_is_left_out(weights):
    with pytest.raises(InvalidOption, match="which weights are left out is not trained"):
        parse_form(weights)
