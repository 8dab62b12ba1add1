"""The hub's files come once, by revision and token, and its absence is noticed within five seconds."""

import socket
import time

import numpy as np
import pytest
from huggingface_hub import constants

from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.hub.repository import fetch_snapshot
from jaxinfer.errors import CheckpointNotFound, DownloadFailed, InvalidCheckpoint
from tests.checkpoint.hub.server import Hub, serving
from tests.checkpoint.weights import tensors, write_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("served"), tensors())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files):
    extra = {"README.md": b"no", "pytorch_model.bin": b"no", "original/params.json": b"no", "onnx/model.json": b"no"}
    other = {**files, "config.json": b'{"model_type": "other"}'}
    with serving(Hub({"main": {**files, **extra, "merges.txt": b"a b"}, "v2": other})) as hub:
        yield hub


@pytest.fixture
def fetch(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def call(repo_id=hub.repo_id, endpoint=hub.endpoint, **options):
        return fetch_snapshot(repo_id, cache_dir=tmp_path / "cache", endpoint=endpoint, **options)

    return call


def test_a_snapshot_holds_the_files_that_loading_needs_and_no_others(fetch):
    calls: list[tuple[int, int]] = []
    folder = fetch(progress=lambda done, total: calls.append((done, total)))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "merges.txt", "model.safetensors"]
    read = open_hf_folder(folder).tensors.read("model.embed.weight", np.dtype(np.float32))
    np.testing.assert_array_equal(read, tensors()["model.embed.weight"])
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert calls[-1] == (total, total)


def test_a_revision_is_its_own_snapshot(fetch):
    assert open_hf_folder(fetch(revision="v2")).config == {"model_type": "other"}
    assert open_hf_folder(fetch()).config == {"model_type": "llama"}
    with pytest.raises(CheckpointNotFound, match="no revision 'v3'"):
        fetch(revision="v3")


def test_the_token_goes_with_every_request(hub, fetch):
    hub.token = "secret"
    with pytest.raises(CheckpointNotFound, match="needs a token"):
        fetch()
    hub.requests.clear()
    fetch(token="secret")
    assert {token for _, token in hub.requests} == {"Bearer secret"}


def test_a_gated_model_says_where_to_ask(hub, fetch):
    hub.token, hub.gated = "secret", True
    with pytest.raises(DownloadFailed, match=f"gated; accept its terms at {hub.endpoint}/{hub.repo_id}"):
        fetch()


def test_an_unknown_model_is_named(fetch):
    with pytest.raises(CheckpointNotFound, match=r"someone/else: no such folder here and no such model"):
        fetch("someone/else")
    with pytest.raises(CheckpointNotFound, match="nor a hub id"):
        fetch("a/b/c")


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_refusal_names_its_status(hub, fetch, status):
    hub.status = status
    with pytest.raises((DownloadFailed, CheckpointNotFound), match=r"answered \d|token") as error:
        fetch()
    assert "\n" not in str(error.value)


def test_the_cache_serves_when_the_hub_is_gone(hub, fetch):
    folder = fetch()
    hub.requests.clear()
    assert fetch(offline=True) == folder
    assert hub.requests == []
    notices: list[str] = []
    assert fetch(endpoint="http://127.0.0.1:9", notice=notices.append) == folder
    assert len(notices) == 1
    assert "unreachable; using the cached snapshot" in notices[0]


def test_files_that_are_cached_are_not_fetched_again(hub, fetch):
    fetch()
    hub.requests.clear()
    fetch()
    assert not [path for path, _ in hub.requests if "GET" in path and "/resolve/" in path]


def test_offline_without_a_cached_snapshot_is_an_error(hub, fetch):
    with pytest.raises(CheckpointNotFound, match="offline mode is on"):
        fetch(offline=True)
    assert hub.requests == []


def test_offline_mode_is_read_as_huggingface_hub_reads_it(hub, fetch, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFound, match="offline mode is on"):
        fetch()
    assert hub.requests == []


def test_a_refused_connection_is_an_error_at_once(fetch):
    start = time.monotonic()
    with pytest.raises(DownloadFailed, match="could not be fetched from http://127"):
        fetch(endpoint="http://127.0.0.1:9")
    assert time.monotonic() - start < 5


def test_a_server_that_never_answers_is_noticed_within_five_seconds(fetch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(DownloadFailed, match="could not be fetched"):
            fetch(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 5


def test_a_model_of_pickles_is_refused_before_the_download(hub, fetch):
    del hub.revisions["main"]["model.safetensors"]
    with pytest.raises(InvalidCheckpoint, match="pickled weights"):
        fetch()
    assert not [path for path, _ in hub.requests if "/resolve/" in path]
    del hub.revisions["main"]["pytorch_model.bin"]
    with pytest.raises(CheckpointNotFound, match="no safetensors"):
        fetch()
