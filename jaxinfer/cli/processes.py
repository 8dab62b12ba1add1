"""Commands that several processes run together, of which the first alone speaks."""

import argparse
import os
import sys
from typing import Any

from jaxinfer.cli.arguments import whole_number
from jaxinfer.errors import InvalidOption

_errors: Any = None


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how a process finds the others of its run."""
    group = parser.add_argument_group("several processes (start each with the same command and inputs)")
    group.add_argument(
        "--distributed", action="store_true", help="run as one of several processes; --mesh covers the devices of all"
    )
    found = "(default: from the environment, on Cloud TPU, GKE and Slurm)"
    group.add_argument("--coordinator", metavar="HOST:PORT", help=f"address of process 0 {found}")
    group.add_argument("--num-processes", metavar="N", type=whole_number(1), help=f"number of processes {found}")
    group.add_argument(
        "--process-id", metavar="I", type=whole_number(0), help=f"number of this process, from 0 {found}"
    )
    group.add_argument(
        "--join-timeout",
        metavar="S",
        type=whole_number(2),
        default=60,
        help="seconds to wait for the others (default: 60)",
    )
    group.add_argument(
        "--heartbeat",
        metavar="S",
        type=whole_number(1),
        default=20,
        help="seconds of silence after which a process counts as lost (default: 20)",
    )


def check_processes(options: argparse.Namespace, *inputs: str | None) -> None:
    """Raise InvalidOption where the options contradict each other; ``inputs`` must be the same for every process."""
    named = (options.coordinator, options.num_processes, options.process_id)
    if not options.distributed:
        if any(value is not None for value in named):
            raise InvalidOption("--coordinator, --num-processes and --process-id need --distributed: add it")
        return
    if options.mesh is None:
        raise InvalidOption("--distributed needs to know how the model is split: add --mesh, such as --mesh tensor=8")
    if "-" in inputs:
        raise InvalidOption("--distributed: standard input reaches one process only; give a file that all can read")


def join_processes(options: argparse.Namespace) -> None:
    """Find the other processes, where there are any, and be silent in all but the first."""
    if not getattr(options, "distributed", False):
        return
    from jaxinfer import distributed

    distributed.initialize(
        options.coordinator,
        options.num_processes,
        options.process_id,
        timeout_seconds=options.join_timeout,
        heartbeat_seconds=options.heartbeat,
    )
    _speak_alone(distributed.is_primary())


def error_stream() -> Any:
    """Return where errors are said, which every process does."""
    return sys.stderr if _errors is None else _errors


def _speak_alone(is_primary: bool) -> None:
    """Leave standard output to what the first process prints: Gloo writes there who is connected."""
    global _errors
    sys.stdout.flush()
    silence = os.open(os.devnull, os.O_WRONLY)
    said = os.dup(1 if is_primary else silence)
    os.dup2(silence, 1)
    sys.stdout = os.fdopen(said, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)
    if not is_primary:
        _errors, sys.stderr = sys.stderr, os.fdopen(silence, "w", closefd=False)
