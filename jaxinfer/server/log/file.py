"""The log as a file: opened to be added to, and read back."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxinfer.errors import InvalidOption
from jaxinfer.server.log.entry import BEGINNING, Entry, read_entry

_READ_BYTES = 1 << 16


def open_log(path: Path) -> int:
    """Open a log to add lines to, or begin one that its user alone can read; return the descriptor.

    The rest of a line that a killed server left is cut off. Raises InvalidOption if the file is something else, cannot
    be written, or has a server that writes it already.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidOption(f"--log {path}: {error.strerror}") from None
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _claim(path, descriptor)
            _mend(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _claim(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InvalidOption(f"--log {path}: another server writes this file") from None


def _mend(path: Path, descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    beginning = BEGINNING.encode()[:size]
    if os.pread(descriptor, len(beginning), 0) != beginning:
        raise InvalidOption(f"--log {path}: is a file of another kind: name a new one")
    end = size
    while end:
        start = max(0, end - _READ_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            os.ftruncate(descriptor, start + found + 1)
            return
        end = start
    os.ftruncate(descriptor, 0)


def read_log(path: Path, note: Callable[[str], None]) -> Iterator[tuple[int, Entry]]:
    """Yield the entries of a log with the numbers of their lines, from 1 on.

    Raises InvalidOption that names the first line that is none. A last line that ends too soon is what a killed server
    left: it is skipped, and ``note`` gets a line that says so.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, read_entry(line)
                except InvalidOption as error:
                    if line.endswith(b"\n"):
                        raise InvalidOption(f"{path}, line {number}: {error}") from None
                    note(f"{path}, line {number}: ends too soon, as a server that was killed leaves it: skipped")
    except OSError as error:
        raise InvalidOption(f"{path}: {error.strerror}") from None
