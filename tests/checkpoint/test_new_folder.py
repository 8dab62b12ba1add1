"""A new folder appears whole or not at all, and never at the cost of another."""

import os

import pytest

from jaxinfer.checkpoint import new_folder as module
from jaxinfer.checkpoint.new_folder import claimed, new_folder
from jaxinfer.errors import InvalidOption


def write(target, text_from=None, meanwhile=None, **options):
    with new_folder(target, **options) as folder:
        (folder / "inner").mkdir()
        (folder / "mark").write_text("new" if text_from is None else (folder / text_from).read_text())
        if meanwhile is not None:
            meanwhile()
        assert not target.exists() or not (target / "mark").exists() or (target / "mark").read_text() == "old"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


@pytest.fixture
def old(target):
    target.mkdir()
    (target / "mark").write_text("old")
    return target


@pytest.mark.parametrize("is_there", [False, True])
def test_it_is_there_when_the_block_has_ended(target, is_there):
    if is_there:
        target.mkdir()
    write(target)
    assert names(target.parent) == ["target"]
    assert names(target) == ["inner", "mark"]


def test_an_error_leaves_nothing(target):
    with pytest.raises(FileNotFoundError):
        write(target, text_from="absent")
    assert names(target.parent) == []


def test_what_stands_there_is_refused(old):
    with pytest.raises(InvalidOption, match="exists and is not empty; give another destination or --overwrite"):
        write(old)
    with pytest.raises(InvalidOption, match="has no receipt, so it is not overwritten"):
        write(old, overwrite_if="receipt")
    (old.parent / "file").write_text("")
    with pytest.raises(InvalidOption, match="not a folder"):
        write(old.parent / "file", overwrite_if="mark")
    with pytest.raises(InvalidOption, match="no such folder; create it first"):
        write(old.parent / "absent" / "target")
    assert names(old.parent) == ["file", "target"]
    assert (old / "mark").read_text() == "old"


@pytest.mark.parametrize("swaps", [True, False])
def test_it_replaces_another_only_once_it_is_complete(old, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    write(old, overwrite_if="mark")
    assert (old / "mark").read_text() == "new"
    assert names(old.parent) == ["target"]


@pytest.mark.parametrize("swaps", [True, False])
def test_an_error_keeps_the_one_to_be_replaced(old, monkeypatch, swaps):
    def fail(*arguments):
        raise OSError(5, "Input/output error")

    if swaps:
        monkeypatch.setattr(module, "_write_through", fail)
    else:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
        renames = iter([os.rename, fail, os.rename])
        monkeypatch.setattr(type(old), "rename", lambda one, other: next(renames)(one, other))
    with pytest.raises(OSError, match="Input/output"):
        write(old, overwrite_if="mark")
    assert (old / "mark").read_text() == "old"
    assert names(old.parent) == ["target"]


def test_what_a_killed_process_left_is_removed_or_put_back(target):
    staging = target.parent / ".target.partial"
    for leftover in ("new", "old"):
        (staging / leftover).mkdir(parents=True)
        (staging / leftover / "mark").write_text("old")
    (staging / "lock").write_text("")
    with pytest.raises(InvalidOption, match="not empty"):
        write(target)
    assert (target / "mark").read_text() == "old"
    write(target, overwrite_if="mark")
    assert names(target.parent) == ["target"]


def test_two_at_a_time_are_told_apart(target):
    with new_folder(target) as folder:
        with pytest.raises(InvalidOption, match="another process is writing it"):
            write(target)
        assert folder.is_dir()
        write(target.parent / "other")
    assert names(target.parent) == ["other", "target"]


def test_a_claim_keeps_others_out_until_its_holder_has_written(target):
    with claimed(target):
        with pytest.raises(InvalidOption, match="another process is writing it"), claimed(target):
            pass
        write(target)
        # Still claimed: what belongs to it is not yet cleared up.
        with pytest.raises(InvalidOption, match="exists and is not empty"), claimed(target):
            pass
        with pytest.raises(InvalidOption, match="another process is writing it"), claimed(target, "mark"):
            pass
    assert names(target.parent) == ["target"]
    with claimed(target, "mark"):
        pass


def test_a_claim_is_refused_where_nothing_can_be_written(old):
    with pytest.raises(InvalidOption, match="exists and is not empty"), claimed(old):
        pass
    assert names(old.parent) == ["target"]


def test_a_target_that_appeared_meanwhile_is_kept(target):
    def appear():
        target.mkdir()
        (target / "mark").write_text("old")

    with pytest.raises(InvalidOption, match="exists and is not empty"):
        write(target, meanwhile=appear)
    assert (target / "mark").read_text() == "old"
    assert names(target.parent) == ["target"]
