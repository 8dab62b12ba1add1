"""Arrays on disk that a long computation fills, and continues to fill after an interrupt."""

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

# The file that marks a folder of complete arrays, and the one that marks incomplete arrays.
FACTS = "cache.json"
_BEGUN = "begun.json"
_LOCK = ".lock"
_SECONDS_BETWEEN_MARKS = 5.0

Shapes = Mapping[str, tuple[tuple[int, ...], Any]]


class Filling:
    """Arrays in progress: ``arrays`` by name, memory-mapped; ``done`` counts the parts that the caller has filled.

    The folder is created if it does not exist. ``is_whole`` means that another process has completed it. Raises
    InvalidCheckpoint if it holds arrays of other ``facts`` or anything else, InvalidOption while another process fills
    them, and OSError if the disk has no room for all of them. The space is allocated at once, because writing to mapped
    memory cannot report a full disk.
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
        """Set the number of filled parts; it is saved every few seconds, so that it survives a killed process."""
        self.done = done
        if time.monotonic() - self._marked >= _SECONDS_BETWEEN_MARKS:
            self._mark()

    def finish(self) -> None:
        """Mark the folder as complete."""
        self._mark()
        (self._folder / _BEGUN).replace(self._folder / FACTS)
        self.is_whole = True

    def __enter__(self) -> "Filling":
        return self

    def __exit__(self, *failure: Any) -> None:
        """Save the number of filled parts if possible, and release the folder."""
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
            self._mark()  # first, because it identifies the folder
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
    """Return the facts of a folder's arrays; raises InvalidCheckpoint if they differ from ``facts``."""
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
