"""Kept files come whole, from nobody but the user, and never take more room than they may."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxinfer.kept.folder import KeptFolder, NotKept


@pytest.fixture
def folder(tmp_path: Path) -> KeptFolder:
    return KeptFolder(tmp_path / "kept", 1000)


def test_a_file_is_read_as_it_was_written_last(folder: KeptFolder) -> None:
    assert folder.read("one") is None
    folder.write("one", [b"first"], 5)
    folder.write("one", [b"sec", b"ond"], 6)
    mapped = folder.map("one")
    assert mapped is not None
    assert folder.read("one") == bytes(mapped) == b"second"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.path.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o755])
def test_a_folder_that_others_reach_is_refused(folder: KeptFolder, mode: int) -> None:
    folder.write("one", [b"x"], 1)
    folder.path.chmod(mode)
    with pytest.raises(NotKept, match="open to other users"):
        folder.read("one")
    with pytest.raises(NotKept, match="open to other users"):
        folder.write("two", [b"x"], 1)
    assert [path.name for path in folder.path.iterdir()] == ["one"]


def test_a_file_that_others_reach_is_refused(folder: KeptFolder) -> None:
    folder.write("one", [b"x"], 1)
    (folder.path / "one").chmod(0o620)
    with pytest.raises(NotKept, match="one is open to other users"):
        folder.map("one")


def test_what_belongs_to_someone_else_is_refused(folder: KeptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("one", [b"x"], 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(folder.path).st_uid + 1)
    with pytest.raises(NotKept, match="belongs to another user"):
        folder.read("one")


def test_links_are_not_followed(folder: KeptFolder, tmp_path: Path) -> None:
    folder.write("one", [b"x"], 1)
    (folder.path / "link").symlink_to("one")
    (tmp_path / "other").symlink_to(folder.path)
    with pytest.raises(NotKept):
        folder.read("link")
    with pytest.raises(NotKept):
        KeptFolder(tmp_path / "other", 1000).read("one")


def test_a_pipe_is_no_file(folder: KeptFolder) -> None:
    folder.write("one", [b"x"], 1)
    os.mkfifo(folder.path / "pipe", 0o600)
    with pytest.raises(NotKept, match="no regular file"):
        folder.read("pipe")


def test_the_least_recently_used_go_first(folder: KeptFolder) -> None:
    for age, name in ((30, "old"), (20, "older in use")):
        folder.write(name, [bytes(400)], 400)
        os.utime(folder.path / name, (time.time() - age,) * 2)
    folder.read("old")
    folder.write("new", [bytes(400)], 400)
    assert {path.name for path in folder.path.iterdir()} == {"old", "new"}
    with pytest.raises(NotKept, match="more than are kept"):
        folder.write("huge", [bytes(1001)], 1001)


def test_what_a_killed_process_left_is_removed(folder: KeptFolder) -> None:
    folder.write("one", [b"x"], 1)
    (unfinished := folder.path / ".unfinished-1").write_bytes(b"half")
    folder.write("two", [b"x"], 1)
    assert unfinished.exists()  # it may be another process's, which is at it
    os.utime(unfinished, (time.time() - 7200,) * 2)
    folder.write("two", [b"x"], 1)
    assert {path.name for path in folder.path.iterdir()} == {"one", "two"}


def test_a_full_disk_is_a_reason(folder: KeptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("one", [b"before"], 6)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda handle: SimpleNamespace(f_bavail=1, f_frsize=4096))
        with pytest.raises(NotKept, match="too little room"):
            folder.write("one", [b"after"], 5)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotKept, match="No space left"):
        folder.write("one", [b"after"], 5)
    assert [path.name for path in folder.path.iterdir()] == ["one"]
    assert folder.read("one") == b"before"


def test_what_the_user_asked_for_may_fill_the_disk(folder: KeptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda handle: SimpleNamespace(f_bavail=1, f_frsize=4096))
    asked = KeptFolder(folder.path, 10000, left_free=0)
    asked.write("one", [bytes(4096)], 4096)
    with pytest.raises(NotKept, match="too little room"):
        asked.write("two", [bytes(4097)], 4097)


def test_a_place_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotKept):
        KeptFolder(tmp_path / "file" / "kept", 1000).write("one", [b"x"], 1)


def test_writers_at_once_leave_one_whole_file(folder: KeptFolder) -> None:
    contents = [bytes([letter]) * 400 for letter in b"abcd"]
    failures: list[object] = []

    def write(content: bytes) -> None:
        for _ in range(25):
            folder.write("one", [content[:100], content[100:]], 400)
            if (found := folder.read("one")) not in contents:
                failures.append(found)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.name for path in folder.path.iterdir()] == ["one"]
