"""Opens a folder written by ``jaxinfer convert``; reads its weights with TensorStore, without Orbax."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    stored_dtype,
)
from jaxinfer.checkpoint.orbax.marker import read_marker
from jaxinfer.checkpoint.orbax.parts import FewBitsTensor, factor_tensor
from jaxinfer.checkpoint.source import Checkpoint, StoredForm, widened
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.folded import Folded
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.sparse import are_places

_INDEX_CACHE_BYTES = 1 << 24


def open_orbax_folder(folder: Path) -> Checkpoint:
    """Open a converted folder: its marker is checked against the weights' shapes; no weights are read.

    Raises :class:`InvalidCheckpoint` for a folder that is damaged, was edited or was written by another tool.
    """
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    marker = read_marker(folder, config)
    tensors = OrbaxTensors(folder, marker.tensors, marker.forms, marker.folded or ())
    folded = None if marker.folded == () else Folded(None if marker.folded is None else tensors.factors)
    opened = Checkpoint(str(folder), config, tensors, rounded_from=marker.rounded_from, folded=folded)
    if marker.source == "gguf":
        return replace(opened, gguf_metadata=read_json_object(folder / GGUF_METADATA))
    if marker.source == "llama2c":
        return replace(opened, llama2c_file=folder / MARKER)
    return replace(opened, folder=folder)


class OrbaxTensors:
    """The tensors of a converted folder; every box that is read is checked against its checksum.

    ``tensors`` are those that are stored, ``forms`` those of which these hold the parts, ``folded`` the names of the
    factors that are among them.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        forms: Mapping[str, FewBitsTensor],
        folded: Sequence[str] = (),
    ):
        self._folder = folder
        self.factors = _Factors(self, folded)
        self._tensors = tensors
        self._forms = forms
        parts = {part for name, tensor in forms.items() for part in tensor.parts(name)}
        parts |= {factor_tensor(name) for name in folded}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in parts}
        self._shapes |= {name: tensor.shape for name, tensor in forms.items()}
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _INDEX_CACHE_BYTES}})
        opening = {name: self._open(name, context) for name in tensors}
        self._stores = {name: self._finish(name, future) for name, future in opening.items()}
        for name, tensor in tensors.items():
            found = self._stores[name]
            if found.shape != tensor.shape or found.dtype.name != tensor.dtype:
                raise self._refuse(name, f"is {found.dtype.name}{list(found.shape)} there: weights of another model")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return dict(self._shapes)

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype in which a tensor is stored; None for one in few bits."""
        return None if name in self._forms else stored_dtype(self._tensors[name].dtype)

    def forms(self) -> dict[str, StoredForm]:
        """Return the form of every tensor in few bits; reads no weights."""
        return {name: tensor.stored for name, tensor in self._forms.items()}

    def quantized(self, name: str) -> QuantizedArray:
        """Read a tensor in few bits, its rows a kernel's outputs."""
        form = self._forms[name].stored.form
        parts = self._forms[name].parts(name).items()
        found = QuantizedArray.of(form, [self.read(part, np.dtype(dtype)) for part, (_, dtype) in parts])
        if found.order is not None and (np.sort(found.order[0]) != np.arange(found.order.shape[1])).any():
            raise self._refuse(f"{name}.order", "is no order of inputs")
        if found.places is not None and not are_places(found.places, found.shape[-1], form):
            raise self._refuse(f"{name}.places", "says of other numbers of weights that they are stored")
        return found

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as ``dtype``."""
        if name in self._forms:
            return widened(self, name, dtype)
        tensor = self._tensors[name]
        if tensor.shape:
            return self.read_rows(name, 0, tensor.shape[0], dtype)
        (expected,) = tensor.checksums
        return self._checked(name, self._stores[name].read(), expected).astype(dtype)

    def read_rows(self, name: str, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Read the rows from ``start`` to before ``stop``; reads only the boxes that hold them."""
        tensor = self._tensors[name]
        result = np.empty((stop - start, *tensor.shape[1:]), dtype)
        for box, expected in zip(tensor.boxes(), tensor.checksums, strict=True):
            first, last = max(box[0].start, start), min(box[0].stop, stop)
            if first >= last:
                continue
            values = self._checked(name, self._stores[name][box].read(), expected)
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

    def _checked(self, name: str, future: Any, expected: int) -> np.ndarray:
        """Return what is read, if it has the checksum that is expected."""
        values = self._finish(name, future)
        if checksum(values) != expected:
            raise self._refuse(name, "is damaged: its checksum does not match")
        return values

    def _finish(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except MemoryError:
            raise
        except Exception as error:  # mostly ValueError, but TensorStore promises no class
            raise self._refuse(name, f"cannot be read ({_shorten(error)})") from None

    def _refuse(self, name: str, reason: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self._folder}: tensor {name} {reason}; convert the model again")


class _Factors(Mapping[str, np.ndarray]):
    """Factors that are read when one is asked for: few models have adapters."""

    def __init__(self, tensors: OrbaxTensors, names: Sequence[str]):
        self._tensors = tensors
        self._read: dict[str, np.ndarray | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._read[name]
        if found is None:
            found = self._read[name] = self._tensors.read(factor_tensor(name), np.dtype(np.float32))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def _shorten(error: Exception) -> str:
    """Return TensorStore's message without the source locations that follow it."""
    text = " ".join(str(error).split()).partition(" [")[0]
    return text if len(text) <= 160 else f"{text[:100]}...{text[-50:]}"
