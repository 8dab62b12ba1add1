"""Checkpoints of a run with Orbax: written in the background, each complete or absent; the last few are kept."""

import errno
import gc
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxinfer.errors import InvalidCheckpoint, WriteFailed

_ITEM = "state"
_KNOWN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


class Checkpoints:
    """The checkpoints in a folder, numbered by step; until it is closed, Orbax's threads log nothing."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._silence = ExitStack()
        self._hush = self._silence.enter_context(_silenced(folder))
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Start to write a checkpoint; raises WriteFailed if this one or the one before could not be written."""
        needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self._folder).free
        if free < needed:  # checked here, because TensorStore would fail with a line for every array
            raise WriteFailed(
                f"{self._folder}: No space left for a checkpoint of {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are "
                "free; the last whole checkpoint is intact"
            )
        if jax.default_backend() == "cpu":  # otherwise the write would read memory that the next step reuses
            state = jax.tree.map(jnp.copy, state)
        with _explained(self._folder):
            self._manager.save(step, args=ocp.args.Composite(**{_ITEM: ocp.args.StandardSave(state)}))

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raises WriteFailed if it could not be written."""
        with _explained(self._folder):
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """Return the step of the last complete checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: Any) -> Any:
        """Return the last state, with the shapes, dtypes and shardings of ``like``."""
        step, abstract = self.latest(), jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            try:
                args = ocp.args.Composite(**{_ITEM: ocp.args.StandardRestore(abstract)})
                return self._manager.restore(step, args=args)[_ITEM]
            except Exception as error:  # Orbax and TensorStore have errors of several classes for damaged files
                reason = " ".join(str(error).split())[:160]
                self._hush.drops_orbax = True
            # Orbax leaves the other reads running; their errors would appear when they are collected.
            gc.collect()
        raise InvalidCheckpoint(
            f"{self._folder / str(step)}: the checkpoint cannot be read ({reason}); remove its folder to go on from "
            "the one before"
        )

    def close(self) -> None:
        """Wait for unfinished writes, ignoring their errors (`wait` raises them), and release the folder."""
        with self._silence, suppress(Exception):
            self._manager.close()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn disk errors of Orbax and TensorStore into one WriteFailed."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        number = error.errno if isinstance(error, OSError) else None
        known = next((one for one in _KNOWN if one == number or os.strerror(one) in text), None)
        reason = text[:200] if known is None else os.strerror(known)
        raise WriteFailed(f"{folder}: {reason}; the last whole checkpoint is intact") from None


class _Hush(logging.Filter):
    """Drops log records of failed writes to a folder: one error is raised, the others are logged.

    With ``drops_orbax`` it also drops those of Orbax's other tasks: reads that a failed restore has left.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.drops_orbax = False
        self._folder = str(folder.resolve())

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record has another cause."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + ("".join(traceback.format_exception(error)) if error else "")
        return self._folder not in text and not (self.drops_orbax and "orbax" in text)


def _report(unraisable: "sys.UnraisableHookArgs") -> None:
    """Show an unraisable error, unless it is TensorStore's report of a failed save to a closed loop."""
    is_late = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    if not is_late or unraisable.object is not None:
        sys.__unraisablehook__(unraisable)


@contextmanager
def _silenced(folder: Path) -> Iterator[_Hush]:
    """Keep Orbax and its event loops from logging errors, with tracebacks, that they also raise."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    # The filter stays: other writes of a failed save may end, and be collected, at any later time.
    hush = _Hush(folder)
    logging.getLogger("asyncio").addFilter(hush)
    if sys.unraisablehook is sys.__unraisablehook__:  # another program's own hook stays in place
        sys.unraisablehook = _report
    try:
        yield hush
    finally:
        logger.disabled = was_disabled
