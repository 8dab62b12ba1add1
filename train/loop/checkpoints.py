"""Checkpoints of a run with Orbax: written in the background, each whole or not there, the last few kept."""

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
    """The checkpoints in a folder, numbered by step; Orbax's threads log nothing until it is closed."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._silence = ExitStack()
        self._hush = self._silence.enter_context(_silenced(folder))
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Begin to write a checkpoint; raises WriteFailed where this or the one before could not be written."""
        needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self._folder).free
        if free < needed:  # told here, because TensorStore fails with a line for every array
            raise WriteFailed(
                f"{self._folder}: No space left for a checkpoint of {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are "
                "free; the last whole checkpoint is intact"
            )
        if jax.default_backend() == "cpu":  # else the write would read memory that the next step is given
            state = jax.tree.map(jnp.copy, state)
        with _explained(self._folder):
            self._manager.save(step, args=ocp.args.Composite(**{_ITEM: ocp.args.StandardSave(state)}))

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raises WriteFailed where it could not be."""
        with _explained(self._folder):
            self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """Return the step of the last whole checkpoint."""
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
            # Orbax leaves the other reads under way, which would complain whenever they are collected.
            gc.collect()
        raise InvalidCheckpoint(
            f"{self._folder / str(step)}: the checkpoint cannot be read ({reason}); remove its folder to go on from "
            "the one before"
        )

    def close(self) -> None:
        """Wait for writes under way, whatever becomes of them (`wait` tells), and let go of the folder."""
        with self._silence, suppress(Exception):
            self._manager.close()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what Orbax and TensorStore report of the disk into one error."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        number = error.errno if isinstance(error, OSError) else None
        known = next((one for one in _KNOWN if one == number or os.strerror(one) in text), None)
        reason = text[:200] if known is None else os.strerror(known)
        raise WriteFailed(f"{folder}: {reason}; the last whole checkpoint is intact") from None


class _Hush(logging.Filter):
    """Drops records of failed writes to a folder: of those that are under way one is raised, the others are logged.

    With ``drops_orbax``, also those of other tasks of Orbax: reads that a failed restore has left.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.drops_orbax = False
        self._folder = str(folder.resolve())

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is of something else."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + ("".join(traceback.format_exception(error)) if error else "")
        return self._folder not in text and not (self.drops_orbax and "orbax" in text)


def _report(unraisable: "sys.UnraisableHookArgs") -> None:
    """Show what could not be raised, unless TensorStore had no loop to tell of a save that failed."""
    is_late = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    if not is_late or unraisable.object is not None:
        sys.__unraisablehook__(unraisable)


@contextmanager
def _silenced(folder: Path) -> Iterator[_Hush]:
    """Keep Orbax and its event loops from logging, with a traceback, the errors that they also raise."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    # These stay, as the other writes of a save that has failed may end, and be collected, at any time later.
    hush = _Hush(folder)
    logging.getLogger("asyncio").addFilter(hush)
    if sys.unraisablehook is sys.__unraisablehook__:  # else another program's own is left in place
        sys.unraisablehook = _report
    try:
        yield hush
    finally:
        logger.disabled = was_disabled
