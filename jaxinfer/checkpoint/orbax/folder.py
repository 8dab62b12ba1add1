"""Opens a folder written by ``jaxinfer convert``; reads its weights with TensorStore, without Orbax."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.orbax.layout import (
    CONFIG,
    GGUF_METADATA,
    MARKER,
    WEIGHTS,
    StoredTensor,
    checksum,
    read_marker,
    stored_dtype,
)
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint

_INDEX_CACHE_BYTES = 1 << 24


def open_orbax_folder(folder: Path) -> Checkpoint:
    """Open a converted folder: its marker is checked against the weights' shapes; no weights are read.

    Raises :class:`InvalidCheckpoint` for a folder that is damaged, was edited or was written by another tool.
    """
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    marker = read_marker(folder, config)
    tensors = OrbaxTensors(folder, marker.tensors)
    if marker.source == "gguf":
        return Checkpoint(str(folder), config, tensors, gguf_metadata=read_json_object(folder / GGUF_METADATA))
    if marker.source == "llama2c":
        return Checkpoint(str(folder), config, tensors, llama2c_file=folder / MARKER)
    return Checkpoint(str(folder), config, tensors, folder=folder)


class OrbaxTensors:
    """The tensors of a converted folder; every box that is read is checked against its checksum."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]):
        self._folder = folder
        self._tensors = tensors
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _INDEX_CACHE_BYTES}})
        opening = {name: self._open(name, context) for name in tensors}
        self._stores = {name: self._finish(name, future) for name, future in opening.items()}
        for name, tensor in tensors.items():
            found = self._stores[name]
            if found.shape != tensor.shape or found.dtype.name != tensor.dtype:
                raise self._refuse(name, f"is {found.dtype.name}{list(found.shape)} there: weights of another model")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_dtype(self, name: str) -> np.dtype:
        """Return the dtype in which a tensor is stored."""
        return stored_dtype(self._tensors[name].dtype)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as ``dtype``."""
        return self.read_rows(name, 0, self._tensors[name].shape[0], dtype)

    def read_rows(self, name: str, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Read the rows from ``start`` to before ``stop``; reads only the boxes that hold them."""
        tensor = self._tensors[name]
        result = np.empty((stop - start, *tensor.shape[1:]), dtype)
        for box, expected in zip(tensor.boxes(), tensor.checksums, strict=True):
            first, last = max(box[0].start, start), min(box[0].stop, stop)
            if first >= last:
                continue
            values = self._finish(name, self._stores[name][box].read())
            if checksum(values) != expected:
                raise self._refuse(name, "is damaged: its checksum does not match")
            # A value too large for dtype becomes infinite, as in the other formats.
            with np.errstate(all="ignore"):
                rows = values[first - box[0].start : last - box[0].start]
                result[(slice(first - start, last - start), *box[1:])] = rows
        return result

    def _open(self, name: str, context: tensorstore.Context) -> Any:
        base = {"driver": "file", "path": f"{(self._folder / WEIGHTS).absolute()}/"}
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            return tensorstore.open(spec, context=context, open=True, read=True)
        except Exception as error:
            raise self._refuse(name, f"cannot be read ({_shorten(error)})") from None

    def _finish(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except MemoryError:
            raise
        except Exception as error:  # mostly ValueError, but TensorStore promises no class
            raise self._refuse(name, f"cannot be read ({_shorten(error)})") from None

    def _refuse(self, name: str, reason: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self._folder}: tensor {name} {reason}; convert the model again")


def _shorten(error: Exception) -> str:
    """Return TensorStore's message without the source locations that follow it."""
    text = " ".join(str(error).split()).partition(" [")[0]
    return text if len(text) <= 160 else f"{text[:100]}...{text[-50:]}"
