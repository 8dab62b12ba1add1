"""A llama2.c file is given to the command line as any other model is."""

import json
import shutil

import pytest

from tests.checkpoint.llama2c import files
from tests.cli.test_mistakes import assert_mistake
from tests.shared_data import shared_data

STORIES = "models/stories260K"


@pytest.mark.slow
def test_generate_continues_a_story(run):
    path = shared_data(STORIES) / "stories260K.bin"
    outcome = run("generate", "Once upon a time", "--model", path, "--max-new-tokens", "8", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["text"] == ", there was a little girl"


def test_each_mistake_is_one_line_that_names_the_file(run, tmp_path):
    sizes = files.Sizes()
    path = files.write_llama2c(tmp_path / "m.bin", 1, sizes, files.hf_tensors(sizes))
    assert_mistake(run("generate", "x", "--model", path), str(path), "tok300.bin", "tokenizer.bin", "tokenizer.model")
    shutil.copy(path, tmp_path / "tokenizer.bin")
    assert_mistake(run("generate", "x", "--model", path), str(tmp_path / "tokenizer.bin"), "not this model's tokenizer")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    assert_mistake(run("generate", "x", "--model", path), str(path), str(size), str(size - 8))
    path.write_bytes(b"\x80\x04\x95.")
    assert_mistake(run("generate", "x", "--model", path), str(path), "pickled weights")
    path.unlink()
    assert_mistake(run("generate", "x", "--model", path), str(path), "no such file")
