"""Reports another program's download by the bytes that appear in a folder."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


@contextmanager
def watched_folder(folder: Path, total: int, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Call ``progress(bytes done, total)`` while the body runs, and once with the total if it succeeds."""
    if progress is None:
        yield
        return
    report, before, ended = progress, _folder_bytes(folder), threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_SECONDS):
            report(min(max(_folder_bytes(folder) - before, 0), total), total)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    report(total, total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # removed or renamed after it was listed
            continue
    return total
