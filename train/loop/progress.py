"""A progress bar on standard error, drawn only on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, str], None]


@contextmanager
def step_progress(label: str, total: int, done: int = 0) -> Iterator[Report]:
    """Yield a function that takes the number of finished steps and further text to show."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, said: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[said]}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total, completed=done, said="")
        yield lambda done, said: bars.update(task, completed=done, said=said)
