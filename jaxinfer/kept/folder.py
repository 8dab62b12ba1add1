"""A folder of files that the user alone can write, kept from one process to the next and bounded in size.

What lies there may be code, so nothing is read out of a folder, or from a file, that another user could have written.
Files come whole or not at all: each is written under another name first. The least recently used go first.
"""

import contextlib
import mmap
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a disk that others write to as well, by what nobody asked to be kept.
_LEFT_FREE = 1 << 30
_UNFINISHED = ".unfinished-"
# Nobody takes this long to write a file, so that an unfinished one is what a process left that was killed.
_ABANDONED_SECONDS = 3600.0


class NotKept(Exception):
    """Why a file was not read or not written; no fault of anybody's, and never an end of the work."""


@dataclass(frozen=True)
class KeptFolder:
    """Files of at most ``max_bytes`` together, which leave ``left_free`` bytes of their disk to others."""

    path: Path
    max_bytes: int
    left_free: int = _LEFT_FREE

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, None where there is none; raises NotKept that says why it cannot be trusted."""
        with self._opened(name) as file:
            return None if file is None else file.read()

    def map(self, name: str) -> mmap.mmap | None:
        """Map a file into memory, None where there is none; raises NotKept that says why it cannot be trusted."""
        with self._opened(name) as file:
            if file is None:
                return None
            if not os.fstat(file.fileno()).st_size:
                raise NotKept("the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def write(self, name: str, pieces: Iterable[Any], num_bytes: int) -> None:
        """Write a file of so many bytes, or replace it, durably; raises NotKept that says why it was not."""
        if num_bytes > self.max_bytes:
            raise NotKept(f"{num_bytes >> 20} MB are more than are kept")
        with _reasons(), self._entered(create=True) as folder:
            self._make_room(folder, name, num_bytes)
            space = os.fstatvfs(folder)
            if space.f_bavail * space.f_frsize < num_bytes + self.left_free:
                raise NotKept("the disk has too little room")
            unfinished = f"{_UNFINISHED}{secrets.token_hex(8)}"
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with open(handle, "wb", buffering=0) as file:
                    for piece in pieces:
                        view = memoryview(piece).cast("B")
                        while view:
                            view = view[file.write(view) :]
                    os.fsync(file.fileno())
                os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Open a file for reading and mark it as used; gives None where there is none."""
        with _reasons(), contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._entered(create=False))
                handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except FileNotFoundError:
                yield None
                return
            file = stack.enter_context(open(handle, "rb", buffering=0))
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise NotKept(f"{self.path / name} is no regular file")
            _require_own(found, self.path / name)
            with contextlib.suppress(OSError):
                os.utime(handle)
            yield file

    @contextlib.contextmanager
    def _entered(self, create: bool) -> Iterator[int]:
        """Open the folder, which stays the one that was looked at whatever its name comes to mean."""
        if not hasattr(os, "geteuid"):
            raise NotKept("this system does not tell who may write to a folder")
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _require_own(os.fstat(folder), self.path)
            yield folder
        finally:
            os.close(folder)

    def _make_room(self, folder: int, name: str, num_bytes: int) -> None:
        """Remove the least recently used files until one more of that size fits."""
        found, now = [], time.time()
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                status = entry.stat(follow_symlinks=False)
                if entry.name.startswith(_UNFINISHED):
                    if now - status.st_mtime > _ABANDONED_SECONDS:
                        os.unlink(entry.name, dir_fd=folder)
                elif entry.name != name and stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, status.st_size, entry.name))
        total = num_bytes + sum(size for _, size, _ in found)
        for _, size, oldest in sorted(found):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(oldest, dir_fd=folder)
            total -= size


def _require_own(found: os.stat_result, path: Path) -> None:
    """Refuse what belongs to someone else, or what others may read or write."""
    if found.st_uid != os.geteuid():
        raise NotKept(f"{path} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise NotKept(f"{path} is open to other users: chmod 700 it, or remove it")


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Turn what the file system refuses into reasons."""
    try:
        yield
    except OSError as error:
        raise NotKept(f"{error.strerror or error}") from error
