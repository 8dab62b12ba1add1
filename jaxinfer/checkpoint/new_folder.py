"""Creates a folder atomically: it appears complete or not at all, even if the writing process is killed."""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from jaxinfer.errors import InvalidOption

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# The staging folders that this process has claimed.
_CLAIMED: set[Path] = set()


def check_target(target: Path, overwrite_if: str | None = None) -> None:
    """Raise InvalidOption unless a folder can be created at ``target``.

    ``target`` may be absent, an empty folder or, with ``overwrite_if``, a folder that contains a file of that name.
    """
    if not target.parent.is_dir():
        raise InvalidOption(f"{target.parent}: no such folder; create it first")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise InvalidOption(f"{target}: exists and is not a folder; give another destination")
    if not any(target.iterdir()):
        return
    if overwrite_if is None:
        raise InvalidOption(f"{target}: exists and is not empty; give another destination or --overwrite")
    if not (target / overwrite_if).is_file():
        raise InvalidOption(
            f"{target}: has no {overwrite_if}, so it is not overwritten; remove it or give another destination"
        )


def staging_of(target: Path) -> Path:
    """Return the hidden staging folder beside ``target``."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def new_folder(target: Path, overwrite_if: str | None = None) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` if the block succeeds, and is removed if it fails.

    It is made in a hidden folder beside ``target``, on the same disk, that this process locks, or has claimed. The
    remains of a killed process are removed. Raises InvalidOption as `check_target` does, and if another process holds
    the lock.
    """
    staging = staging_of(target)
    new, old = staging / "new", staging / "old"
    with nullcontext() if staging in _CLAIMED else _locked(target, overwrite_if):
        try:
            check_target(target, overwrite_if)
            new.mkdir()
            yield new
            _write_through(new)
            check_target(target, overwrite_if)  # it may have appeared since
            _publish(new, old, target)
            _write_through(target.parent, is_deep=False)
        finally:
            _clear(new, old)


@contextmanager
def claimed(target: Path, overwrite_if: str | None = None) -> Iterator[None]:
    """Keep other processes from writing ``target`` while this one makes what it then writes by `new_folder`.

    Raises InvalidOption as `new_folder` does.
    """
    staging = staging_of(target)
    with _locked(target, overwrite_if):
        _CLAIMED.add(staging)
        try:
            yield
        finally:
            _CLAIMED.discard(staging)


@contextmanager
def _locked(target: Path, overwrite_if: str | None) -> Iterator[None]:
    """Lock the staging folder, clear up after a killed process, and remove the folder at the end."""
    check_target(target, overwrite_if)
    staging = staging_of(target)
    lock = _lock(staging, target)
    new, old = staging / "new", staging / "old"
    try:
        if old.exists() and not target.exists():  # the process was killed between the two renames
            old.rename(target)
        _clear(new, old)
        check_target(target, overwrite_if)
        yield
    finally:
        with suppress(OSError):
            (staging / "lock").unlink()
            staging.rmdir()
        os.close(lock)


def _lock(staging: Path, target: Path) -> int:
    """Return a descriptor with a lock that ends with this process, however it ends."""
    while True:
        staging.mkdir(exist_ok=True)
        try:
            lock = os.open(staging / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another process has just finished and removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), (staging / "lock").stat()):
                    return lock
        except BlockingIOError:
            os.close(lock)
            raise InvalidOption(f"{target}: another process is writing it; wait for that one to end") from None
        os.close(lock)


def _clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(new: Path, old: Path, target: Path) -> None:
    if not os.path.lexists(target) or not any(target.iterdir()):
        new.rename(target)
    elif not _exchange(new, target):
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; return False if the system or its file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _write_through(folder: Path, *, is_deep: bool = True) -> None:
    """Flush a folder's list of names to disk and, if ``is_deep``, all of its files."""
    for place, _, names in os.walk(folder) if is_deep else [(folder, [], [])]:
        for path in (*(Path(place, name) for name in names), Path(place)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
