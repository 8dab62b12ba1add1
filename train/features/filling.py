"""Hidden states on the disk: arrays that a long computation fills, and goes on filling where it was interrupted."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from jaxinfer.errors import InvalidCheckpoint, InvalidOption

# What a folder of whole arrays is told by, and one of arrays that are not yet.
FACTS = "cache.json"
_BEGUN = "begun.json"
_LOCK = ".lock"
_SECONDS_BETWEEN_MARKS = 5.0

Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


class Filling:
    """Arrays under way: ``arrays`` by name, memory-mapped, of which ``done`` parts, as the caller counts, are filled.

    The folder is made where there is none; ``is_whole`` tells that another process has filled it meanwhile. Raises
    InvalidCheckpoint where it holds other arrays than those of ``facts`` or anything else, InvalidOption while another
    process fills them, and OSError where there is no room for all of them: their space is taken at once, because a full
    disk cannot be told when memory is written.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], shapes: Shapes) -> None:
        self._folder, self._facts, self._marked = folder, facts, time.monotonic()
        self.arrays: dict[str, np.ndarray] = {}
        self.done = 0
        if not folder.parent.is_dir():
            raise InvalidOption(f"{folder.parent}: no such folder; create it first")
        if folder.exists() and not folder.is_dir():
            raise InvalidOption(f"{folder}: exists and is not a folder; give another --cache")
        folder.mkdir(exist_ok=True)
        if not (folder / _BEGUN).exists() and {path.name for path in folder.iterdir()} - {_LOCK, f".{_BEGUN}", FACTS}:
            raise InvalidCheckpoint(f"{folder}: is not empty and holds no hidden states; give another --cache")
        self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._begin(shapes)
        except BaseException:
            os.close(self._lock)
            raise

    def advance(self, done: int) -> None:
        """Say that so many parts are filled; what is marked every few seconds outlives a killed process."""
        self.done = done
        if time.monotonic() - self._marked >= _SECONDS_BETWEEN_MARKS:
            self._mark()

    def finish(self) -> None:
        """Say that all is filled: the folder is whole from here on."""
        self._mark()
        (self._folder / _BEGUN).replace(self._folder / FACTS)
        self.is_whole = True

    def __enter__(self) -> "Filling":
        return self

    def __exit__(self, *failure: Any) -> None:
        """Mark what is filled, as far as that goes, and let others go on with it."""
        try:
            if not self.is_whole:
                with suppress(OSError):
                    self._mark()
        finally:
            os.close(self._lock)

    def _begin(self, shapes: Shapes) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidOption(f"{self._folder}: another process is filling it; wait for that one to end") from None
        self.is_whole = (self._folder / FACTS).is_file()
        if self.is_whole:
            return
        begun = self._folder / _BEGUN
        self.done = int(read_facts(begun, self._facts)["done"]) if begun.exists() else 0
        if not self.done:
            self._mark()  # first of all: it is what tells this folder from others
        for name, (shape, dtype) in shapes.items():
            path = self._folder / f"{name}.npy"
            self.arrays[name] = _reopen(path, shape, dtype) if self.done else _create(path, shape, dtype)

    def _mark(self) -> None:
        for array in self.arrays.values():
            array.flush()  # pyright: ignore[reportAttributeAccessIssue]
        new = self._folder / f".{_BEGUN}"
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps({**self._facts, "done": self.done}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._folder / _BEGUN)
        self._marked = time.monotonic()


def _create(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        try:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError:
            path.unlink()
            raise
    return array


def _reopen(path: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    try:
        array = open_memmap(path, mode="r+")
    except (ValueError, FileNotFoundError):
        array = np.zeros(())
    if array.shape != shape or array.dtype != dtype:
        raise InvalidCheckpoint(f"{path}: is damaged; remove {path.parent} or give another --cache")
    return array


def read_facts(path: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a folder's arrays are of; raises InvalidCheckpoint where that is not ``facts``."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.setdefault("done", 0), int):
        raise InvalidCheckpoint(f"{path}: is damaged; remove {path.parent} or give another --cache")
    for name in {**facts, **found}:
        if name != "done" and found.get(name) != facts.get(name):
            raise InvalidCheckpoint(
                f"{path.parent}: holds hidden states with {name} {found.get(name)!r}, not {facts.get(name)!r}; "
                "give another --cache"
            )
    return found
