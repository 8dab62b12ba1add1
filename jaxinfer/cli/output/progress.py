"""Progress bars on standard error, for people only: where it is no terminal, nothing is drawn."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function that takes bytes done and in all; another total begins another bar. None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    # Imported here: it takes a tenth of a second that a script need not wait for.
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[int, rich_progress.TaskID] = {}

        def report(done: int, total: int) -> None:
            if total not in tasks:
                tasks[total] = bars.add_task(label, total=total)
            bars.update(tasks[total], completed=done)

        yield report


@contextmanager
def count_progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that is called after each of ``total`` pieces of work with the name of it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda name: bars.update(task, advance=1, description=f"{label}: {name}")
