"""Writes tensors with Orbax, a few at a time: memory never holds the whole model."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.checkpoint.orbax.layout import BOX_BYTES, StoredTensor, choose_box, describe_tensor
from jaxinfer.checkpoint.source import TensorSource

_GROUP_BYTES, _GROUP_TENSORS = 1 << 26, 16


def write_tensors(
    folder: Path, source: TensorSource, dtypes: Mapping[str, np.dtype], progress: Callable[[int, int], None] | None
) -> dict[str, StoredTensor]:
    """Write the tensors named in ``dtypes``, in those dtypes, as an Orbax checkpoint; return what was written.

    ``progress`` receives the bytes done and the bytes in total. An interrupt stops after the tensors being written.
    After an interrupt or an error the content of ``folder`` is unusable.
    """
    shapes = source.shapes()
    pending = {name: _Pending(name, tuple(shapes[name]), dtype) for name, dtype in dtypes.items()}
    handler = _PendingHandler(source, sum(tensor.nbytes for tensor in pending.values()), progress)
    save_args = {
        name: ocp.SaveArgs(chunk_byte_size=BOX_BYTES if tensor.is_cut else None) for name, tensor in pending.items()
    }

    def save() -> None:
        registry = ocp.type_handlers.create_type_handler_registry((_Pending, handler))
        # Weights hardly compress, and decompressing them would slow down reading.
        as_arrays = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(as_arrays) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(pending, save_args=save_args))

    # Orbax's event loop runs in its own thread, so that an interrupt cannot leave it half done.
    with _silenced_logs(), ThreadPoolExecutor(1) as executor:
        future = executor.submit(save)
        try:
            future.result()
        except BaseException:
            handler.cancelled.set()
            raise
    return {name: handler.written[name] for name in pending}


@dataclass(frozen=True)
class _Pending:
    """A tensor that is read when its turn to be written comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_cut(self) -> bool:
        return choose_box(self.shape, self.dtype.itemsize) != self.shape


class _PendingHandler(ocp.type_handlers.NumpyHandler):
    """Writes pending tensors as NumPy arrays; readers of Orbax checkpoints see NumPy arrays."""

    def __init__(self, source: TensorSource, total: int, progress: Callable[[int, int], None] | None):
        super().__init__(deepcopy_host_arrays=False)
        self._source = source
        self._total = total
        self._progress = progress
        self.cancelled = threading.Event()
        self.written: dict[str, StoredTensor] = {}

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list:
        """Write all tensors before returning, so no future remains to wait for."""
        done = 0
        for group in _groups(values):
            futures = []
            try:
                for index in group:
                    # One at a time, because Orbax gives each call its own event loop: if one write of a loop fails
                    # while another is in progress, the other prints its own traceback.
                    chosen = [args[index]] if args else None
                    futures += await super().serialize([self._read(values[index])], [infos[index]], chosen)
            finally:
                _wait_for_all(futures)
            done += sum(values[index].nbytes for index in group)
            if self._progress is not None:
                self._progress(done, self._total)
        return []

    def _read(self, tensor: _Pending) -> np.ndarray:
        if self.cancelled.is_set():
            raise RuntimeError("the writing was cancelled")
        # `np.ascontiguousarray` would give a number an axis.
        array = np.asarray(self._source.read(tensor.name, tensor.dtype), order="C")
        self.written[tensor.name] = describe_tensor(array)
        return array


def _wait_for_all(futures: Sequence[Any]) -> None:
    """Wait until no write is in progress; then raise the first error."""
    errors = []
    for future in futures:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _groups(values: Sequence[_Pending]) -> Iterator[list[int]]:
    """Yield the indices of neighbours that are written together; each group costs one round of disk writes."""
    group: list[int] = []
    num_bytes = 0
    for index, tensor in enumerate(values):
        if group and (len(group) == _GROUP_TENSORS or num_bytes + tensor.nbytes > _GROUP_BYTES):
            yield group
            group, num_bytes = [], 0
        group.append(index)
        num_bytes += tensor.nbytes
    yield group


@contextmanager
def _silenced_logs() -> Iterator[None]:
    """Keep Orbax from logging errors, with tracebacks, that it also raises."""
    logger = logging.getLogger("absl")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
