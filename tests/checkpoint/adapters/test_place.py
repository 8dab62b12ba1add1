"""An adapter is a folder here, or one of a repository on the hub at a revision, of which its two files are fetched."""

import pytest
from huggingface_hub import constants

from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS
from jaxinfer.checkpoint.adapters.place import adapter_folder
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.checkpoint.hub import repository
from jaxinfer.errors import JaxinferError
from tests.checkpoint.hub.server import Hub, serving

REPOSITORY = "someone/tiny"


def files_of(kind: bytes) -> dict[str, bytes]:
    folders = ("", "poems/last/", "prose/")
    names = {f"{folder}{name}": kind + folder.encode() for folder in folders for name in (CONFIG, WEIGHTS)}
    return {**names, "training_args.bin": b"no", "model.safetensors": b"no", "poems/optimizer.safetensors": b"no"}


@pytest.fixture(scope="module")
def server():
    pickled = {CONFIG: b"{}", "adapter_model.bin": b"no"}
    with serving(Hub({"main": files_of(b"main "), "v2": files_of(b"v2 "), "old": pickled})) as hub:
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch, here = repository.fetch_snapshot, {"cache_dir": tmp_path / "cache", "endpoint": server.endpoint}
    monkeypatch.setattr(repository, "fetch_snapshot", lambda *asked, **more: fetch(*asked, **here, **more))
    return server


@pytest.mark.parametrize(
    ("where", "revision", "expected"),
    [
        (REPOSITORY, None, b"main "),
        (f"{REPOSITORY}@v2", None, b"v2 "),
        (f"{REPOSITORY}/prose", "v2", b"v2 prose/"),
        (f"{REPOSITORY}/poems/last@main", "main", b"main poems/last/"),
    ],
)
def test_a_place_on_the_hub_is_fetched(hub, where, revision, expected):
    folder = adapter_folder(where, revision=revision)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert found == {CONFIG: expected, WEIGHTS: expected}


def test_without_a_hub_what_was_fetched_is_used_and_nothing_else(hub, monkeypatch):
    adapter_folder(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (adapter_folder(REPOSITORY) / WEIGHTS).read_bytes() == b"main "
    with pytest.raises(JaxinferError, match="not in the hub cache, and offline mode is on"):
        adapter_folder(f"{REPOSITORY}/prose")


@pytest.mark.parametrize(
    ("where", "revision", "message"),
    [
        ("", None, "is no path of a folder, and no hub id"),
        (f"{REPOSITORY}/../other", None, "no such folder: give one that PEFT saved"),
        (f"{REPOSITORY}@v3", None, "no revision 'v3'"),
        (f"{REPOSITORY}@v2", "main", "it names a revision, and revision='main' another"),
        ("someone/else", None, "someone/else: no such folder here and no such model"),
        (f"{REPOSITORY}/drama", None, "the hub holds no drama/adapter_config.json there"),
        (f"{REPOSITORY}@old", None, "pickled weights can run any code"),
    ],
)
def test_what_is_no_place_is_refused_by_one_line(hub, where, revision, message):
    with pytest.raises(JaxinferError, match=message) as caught:
        adapter_folder(where, revision=revision)
    assert "\n" not in str(caught.value)


def test_a_folder_here_comes_first_and_has_no_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert adapter_folder(REPOSITORY) == adapter_folder(tmp_path / REPOSITORY).relative_to(tmp_path)
    with pytest.raises(JaxinferError, match="a folder has no revision 'v2'"):
        adapter_folder(REPOSITORY, revision="v2")
