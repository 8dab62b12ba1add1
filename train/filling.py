"""Arrays on the disk that a long computation fills, and goes on filling where it was interrupted."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from jaxinfer.errors import InvalidCheckpoint, InvalidOption

# What a folder of whole arrays is told by, and one of arrays that are not yet.
FACTS = "cache.json"
_BEGUN = "begun.json"
_SECONDS_BETWEEN_MARKS = 5.0


class Filling:
    """Arrays under way: ``arrays`` by name, memory-mapped, of which ``done`` parts, as the caller counts, are filled.

    The folder is made where there is none. Raises InvalidCheckpoint where it holds other arrays than those of
    ``facts``, InvalidOption while another process fills them, and OSError where there is no room for all of them: their
    space is taken at once, because a full disk cannot be told when memory is written.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]
    ) -> None:
        self._folder, self._facts, self._marked = folder, facts, time.monotonic()
        folder.mkdir(exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            begun = self._begun()
            self.done = begun or 0
            self.arrays = {
                name: self._open(name, shape, dtype, is_new=begun is None) for name, (shape, dtype) in shapes.items()
            }
            if begun is None:
                self._mark()
        except BaseException:
            os.close(self._lock)
            raise

    def advance(self, done: int) -> None:
        """Say that so many parts are filled; what is marked every few seconds outlives a killed process."""
        self.done = done
        if time.monotonic() - self._marked > _SECONDS_BETWEEN_MARKS:
            self._mark()

    def finish(self) -> None:
        """Say that all is filled: the folder is whole from here on."""
        self._mark()
        (self._folder / _BEGUN).replace(self._folder / FACTS)

    def close(self) -> None:
        """Mark what is filled, and let others go on with it."""
        if not (self._folder / FACTS).is_file():
            self._mark()
        os.close(self._lock)

    def __enter__(self) -> "Filling":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def _begun(self) -> int | None:
        """Return how much another run has filled, None where there is nothing."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidOption(f"{self._folder}: another process is filling it; wait for that one to end") from None
        path = self._folder / _BEGUN
        if not path.is_file():
            if any(one.suffix != ".npy" and one.name != f".{_BEGUN}" for one in self._folder.iterdir()):
                raise InvalidCheckpoint(f"{self._folder}: holds no hidden states; give another --cache")
            return None
        return int(read_facts(path, self._facts)["done"])

    def _open(self, name: str, shape: tuple[int, ...], dtype: Any, *, is_new: bool) -> np.ndarray:
        path = self._folder / f"{name}.npy"
        array = open_memmap(path, mode="w+" if is_new else "r+", dtype=dtype, shape=shape)
        if is_new and hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array

    def _mark(self) -> None:
        for array in self.arrays.values():
            array.flush()  # pyright: ignore[reportAttributeAccessIssue]
        new = self._folder / f".{_BEGUN}"
        new.write_text(json.dumps({**self._facts, "done": self.done}, indent=2) + "\n")
        new.replace(self._folder / _BEGUN)
        self._marked = time.monotonic()


def read_facts(path: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a folder's arrays are of; raises InvalidCheckpoint where that is not ``facts``."""
    found = json.loads(path.read_bytes())
    for name in facts | found:
        if name != "done" and found.get(name) != facts.get(name):
            raise InvalidCheckpoint(
                f"{path.parent}: holds hidden states with {name} {found.get(name)!r}, not {facts.get(name)!r}; "
                "give another --cache"
            )
    return found
