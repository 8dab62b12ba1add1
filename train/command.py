"""Shared by every ``python -m train.NAME``: one-line error messages, and the types of options."""

import argparse
import sys
from collections.abc import Callable, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

from jaxinfer.command_line import Parser, describe
from jaxinfer.errors import JaxinferError
from jaxinfer.jax_setup import prepare_jax

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


def run_command(
    name: str,
    summary: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse and run one command; return 0, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        parser = Parser(prog=f"python -m train.{name}", description=summary)
        add_arguments(parser)
        options = parser.parse_args(arguments)
        prepare_jax()
        return run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except JaxinferError as error:
        return _report(str(error))
    except OSError as error:
        return _report(describe(error))
    except MemoryError:
        return _report("this machine's memory is full; use smaller batches or --dtype bfloat16")
    except Exception as error:
        # JAX has one class for all device errors. Of these, the user can fix only a full memory.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _report("the device's memory is full; use smaller batches or --dtype bfloat16")


def number(kind: type[int] | type[float], least: float | int, most: float | int = float("inf")) -> Callable[[str], Any]:
    """Return an argument type: an integer or a fraction from ``least`` to ``most``."""
    what = "a whole number" if kind is int else "a number"
    bounds = f"of {least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {bounds}")
        return value

    return parse


def existing_file(text: str) -> Path:
    """Return the path of a file that must exist."""
    path = Path(expanduser(text))
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: {'not a file' if path.exists() else 'no such file'}")
    return path


def _report(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_MISTAKE
