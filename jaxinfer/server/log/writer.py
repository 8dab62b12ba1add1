"""Writes the log in a thread of its own, so that no answer waits for a disk."""

import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jaxinfer.server.log.entry import Decode, Entry, write_entry
from jaxinfer.server.log.file import open_log

# Requests that wait to be written; beyond, they are left out: memory is not the disk's.
_MOST_WAITING = 1024
_CLOSE_SECONDS = 5.0


def _warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class RequestLog:
    """A log that a server adds to: whole lines, each at once in the file.

    Where the file cannot be written, the server goes on: ``warn`` gets one line, and what could not be written is
    missing. With ``decode``, which may be set until the first entry, the log has texts.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = _warn) -> None:
        self.decode: Decode | None = None
        self._path, self._warn, self._has_warned = path, warn, False
        self._descriptor = open_log(path)
        self._waiting: queue.Queue[Entry | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="jaxinfer-log", daemon=True)
        self._thread.start()

    def write(self, entry: Entry) -> None:
        """Have an entry written; return at once."""
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._complain("the disk is too slow")

    def close(self) -> None:
        """Wait for what is to be written, some seconds at most."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (entry := self._waiting.get()) is not None:
                self._append(write_entry(entry, self.decode))
        finally:
            os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        """Write a line, all of it or nothing."""
        before, rest = os.fstat(self._descriptor), memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            if stat.S_ISREG(before.st_mode):
                os.ftruncate(self._descriptor, before.st_size)
            self._complain(error.strerror or str(error))

    def _complain(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"--log {self._path}: {reason}: requests are missing there from now on")
