"""Recipes run commands of this package one after another; each, and so the whole, goes on after an interrupt."""

import subprocess
import sys
from pathlib import Path

from jaxinfer.errors import JaxinferError
from train.command import EXIT_INTERRUPTED


class StepFailed(JaxinferError, RuntimeError):
    """A command of a recipe failed and has printed its error."""


def call(command: str, *arguments: object, to: Path | None = None) -> None:
    """Run a command; an interrupted one gets all the time it needs to save.

    With ``to``, what it prints on standard output becomes that file, once it has ended well.
    """
    told = [sys.executable, "-m", command, *map(str, arguments)]
    print(" ".join(told[1:]), file=sys.stderr)
    if to is None:
        _run(command, told, None)
        return
    partial = to.with_name(f"{to.name}.partial")
    with partial.open("wb") as file:
        _run(command, told, file)
    partial.rename(to)


def _run(command: str, told: list[str], output: object) -> None:
    process = subprocess.Popen(told, stdout=output)  # pyright: ignore[reportArgumentType, reportCallIssue]
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the command got the signal too
            continue
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise StepFailed(f"{command} ended with exit code {code}; the same command goes on from there")
