"""Checkpoints of a run with Orbax: written in the background, each whole or not there, the last few kept."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxinfer.errors import InvalidCheckpoint, WriteFailed

_ITEM = "state"
_KNOWN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


class Checkpoints:
    """The checkpoints in a folder, numbered by step."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: Any) -> None:
        """Begin to write a checkpoint; raises WriteFailed where this or the one before could not be written."""
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
        try:
            with _silenced_logs():
                restored = self._manager.restore(
                    step, args=ocp.args.Composite(**{_ITEM: ocp.args.StandardRestore(abstract)})
                )
        except Exception as error:  # Orbax and TensorStore have errors of several classes for damaged files
            raise InvalidCheckpoint(
                f"{self._folder / str(step)}: the checkpoint cannot be read ({' '.join(str(error).split())[:160]}); "
                "remove its folder to go on from the one before"
            ) from None
        return restored[_ITEM]

    def close(self) -> None:
        """Wait for writes under way, whatever becomes of them, and let go of the folder."""
        with _silenced_logs():
            self._manager.close()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what Orbax and TensorStore report of the disk into one error."""
    try:
        with _silenced_logs():
            yield
    except Exception as error:
        text = " ".join(str(error).split())
        number = error.errno if isinstance(error, OSError) else None
        known = next((one for one in _KNOWN if one == number or os.strerror(one) in text), None)
        reason = text[:200] if known is None else os.strerror(known)
        raise WriteFailed(f"{folder}: {reason}; the last whole checkpoint is intact") from None


@contextmanager
def _silenced_logs() -> Iterator[None]:
    """Keep Orbax from logging, with a traceback, the errors that it also raises."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
