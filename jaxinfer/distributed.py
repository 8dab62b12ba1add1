"""Runs one program in several processes: JAX's multi-controller runtime, with one-line error messages.

Every process runs the same commands on the same inputs and drives its own devices. `LanguageModel` and the command line
do the rest. When a process dies or cannot be reached, JAX ends the others with a message and the signal SIGABRT: at
once if it was the coordinator or if a collective was running on CPUs, else after ``heartbeat_seconds`` of silence.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxinfer.errors import InvalidOption, JaxinferError

DEFAULT_TIMEOUT_SECONDS = 60
DEFAULT_HEARTBEAT_SECONDS = 20
EXIT_UNREACHABLE = 2

_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")
_LOST_PEER = re.compile(r"Gloo .*failed|coordination service|distributed service|heartbeat", re.IGNORECASE)


class DistributedFailed(JaxinferError, ConnectionError):
    """The processes of a run did not find each other, or one was lost."""


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = DEFAULT_TIMEOUT_SECONDS,
    heartbeat_seconds: int = DEFAULT_HEARTBEAT_SECONDS,
) -> None:
    """Join the other processes of a run. Every process must call this before it uses any device.

    ``coordinator`` is process 0's ``host:port``. JAX detects missing values from the environment (Cloud TPU, GKE,
    Slurm, Open MPI). If the coordinator does not answer or processes are missing, this process ends after
    ``timeout_seconds`` with one line on standard error and exit code 2. A silent process counts as lost after
    ``heartbeat_seconds``. Raises InvalidOption if the values contradict each other or nothing is detected,
    :class:`DistributedFailed` if JAX refuses them.
    """
    _check(coordinator, num_processes, process_id, timeout_seconds, heartbeat_seconds)
    if not _uses_accelerator():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It keeps SIGTERM from ending the process, for checkpoints that this library does not write.
    jax.config.update("jax_enable_preemption_service", False)
    where = "the coordinator" if coordinator is None else f"the coordinator {coordinator}"
    line = f"error: {where} or another process did not answer within {timeout_seconds} s; start all of them, and check "
    with _last_words(line + "the address and the number of processes"):
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                # JAX waits this long for each of two replies.
                initialization_timeout=max(1, timeout_seconds // 2),
                heartbeat_timeout_seconds=heartbeat_seconds,
                # At its end a process waits for the others, one of which may have failed.
                shutdown_timeout_seconds=heartbeat_seconds,
            )
        except ValueError as error:
            if coordinator is None:
                raise InvalidOption(
                    "nothing in the environment says which processes run together: give the coordinator's host:port, "
                    "the number of processes and this one's id"
                ) from error
            if num_processes is None or process_id is None:
                raise InvalidOption(
                    f"beside the coordinator {coordinator}, give the number of processes and this one's id: nothing in "
                    "the environment says them"
                ) from error
            raise InvalidOption(f"distributed: {_first_line(error)}") from error
        except RuntimeError as error:
            if "before" in _first_line(error):
                raise InvalidOption(
                    "distributed: JAX was already asked for its devices; call initialize() earlier"
                ) from error
            raise DistributedFailed(f"distributed: {_first_line(error)}") from error


def is_primary() -> bool:
    """Tell whether this process prints output: the first process, or the only one."""
    return jax.process_index() == 0


def is_lost_peer(error: BaseException) -> bool:
    """Tell whether a runtime error means that another process of the run is gone."""
    return isinstance(error, jax.errors.JaxRuntimeError) and bool(_LOST_PEER.search(str(error)))


def _check(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout_seconds: int,
    heartbeat_seconds: int,
) -> None:
    port = int(coordinator.rpartition(":")[2]) if coordinator and _ADDRESS.fullmatch(coordinator) else 0
    if coordinator is not None and not 0 < port < 1 << 16:
        raise InvalidOption(f"coordinator {coordinator!r} is no address: write host:port, such as 10.0.0.1:8476")
    if num_processes is not None and num_processes < 1:
        raise InvalidOption(f"num_processes={num_processes}: a run has at least one process")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise InvalidOption(f"process_id={process_id} is not between 0 and {(num_processes or 1) - 1}")
    if timeout_seconds < 2:
        raise InvalidOption(f"timeout_seconds={timeout_seconds}: give the processes at least 2 s to find each other")
    if heartbeat_seconds < 1:
        raise InvalidOption(f"heartbeat_seconds={heartbeat_seconds}: give at least 1 s")


def _uses_accelerator() -> bool:
    """Tell whether JAX will choose a platform other than the CPU, without asking JAX, which would fix the choice."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    return bool(platforms) and platforms.split(",")[0] != "cpu"


@contextmanager
def _last_words(line: str) -> Iterator[None]:
    """If this process aborts in the context, print one line and exit with code 2.

    If nobody answers, JAX does not raise: it prints a stack trace and aborts, in this thread.
    """
    sys.stderr.flush()
    said = os.dup(2)
    libc = ctypes.CDLL(None)
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)

    def speak(_: int) -> None:
        os.write(said, f"{line}\n".encode())
        os._exit(EXIT_UNREACHABLE)

    handler = handler_type(speak)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
        os.dup2(said, 2)
        os.close(said)
        os.close(silence)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
