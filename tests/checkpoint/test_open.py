"""What a user names is opened from disk where it exists, else fetched, else refused in one line."""

from pathlib import Path

import pytest

from jaxinfer.checkpoint.hub import fetch
from jaxinfer.checkpoint.hub import repository as hub
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint
from tests.checkpoint.weights import tensors, write_folder


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Record what the network is asked for, and answer with a folder."""
    folder = write_folder(tmp_path / "fetched", tensors())
    asked: list[tuple] = []

    def fetched(name, *args):
        asked.append(("known", name))
        return folder

    def snapshot(name, revision, token, **options):
        asked.append(("hub", name, revision, token))
        return folder

    monkeypatch.setattr(fetch, "fetch", fetched)
    monkeypatch.setattr(hub, "fetch_snapshot", snapshot)
    return asked


@pytest.mark.parametrize("kind", [str, Path])
def test_an_existing_folder_is_opened(asked, tmp_path, kind):
    folder = write_folder(tmp_path / "mine", tensors())
    assert open_checkpoint(kind(folder)).folder == folder
    assert asked == []


def test_a_folder_comes_before_a_hub_id_of_the_same_name(asked, tmp_path, monkeypatch):
    write_folder(tmp_path / "someone" / "tiny", tensors())
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("someone/tiny").folder == Path("someone/tiny")
    assert asked == []


def test_known_names_and_hub_ids_are_fetched(asked):
    open_checkpoint("smollm2-135m-instruct")
    open_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct")
    open_checkpoint("someone/tiny", revision="v2", token="secret")
    open_checkpoint("HuggingFaceTB/SmolLM2-135M-Instruct", revision="v2")
    open_checkpoint("gpt2")
    assert asked == [
        ("known", "smollm2-135m-instruct"),
        ("known", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("hub", "someone/tiny", "v2", "secret"),
        ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct", "v2", None),
        ("hub", "gpt2", None, None),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "./absent", "../absent", "/absent/model", "~/absent-model", "~nobody-at-all/x", "a/b/c", "absent.gguf",
        "someone/absent.gguf", "absent.bin", "", "a b", "x" * 5000 + "/", "nul\0", Path("absent"), "two\nlines",
    ],
)  # fmt: skip
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(asked, name):
    with pytest.raises(CheckpointNotFound, match="no such file or folder") as error:
        open_checkpoint(name)
    assert asked == []
    assert "\n" not in str(error.value)


def test_a_folder_of_gguf_files_is_refused_with_one_of_them(tmp_path):
    for name in ("model-Q8_0.gguf", "model-Q4_0.GGUF", "README.md"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointNotFound, match=r"give one of them, such as .*model-Q4_0\.GGUF$"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.PT", "model.pth", "last.ckpt"])
def test_a_pickle_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(InvalidCheckpoint, match="pickled weights"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(("name", "named"), [("model.safetensors", "config.json"), ("notes.txt", "not a checkpoint")])
def test_other_files_are_refused_with_the_mend(tmp_path, name, named):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidCheckpoint, match=named):
        open_checkpoint(tmp_path / name)
