"""The interface of every checkpoint format: a config, and tensors under Hugging Face names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxinfer.models.folded import Folded
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


@runtime_checkable
class TensorSource(Protocol):
    """Tensors that stay on disk until one is read."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor by its Hugging Face name; reads no weights."""
        ...

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor, converted to ``dtype``; the result may be a read-only view of a memory map."""
        ...


@runtime_checkable
class TypedTensorSource(TensorSource, Protocol):
    """Tensors that know their own dtypes."""

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype that holds a tensor without loss; None for a quantised tensor."""
        ...


@runtime_checkable
class DescribedSource(TypedTensorSource, Protocol):
    """Tensors of files that say more about them."""

    def metadata(self) -> Mapping[str, str]:
        """Return what the files say, by its name."""
        ...


class BlockRows(NamedTuple):
    """A tensor's rows of ``num_blocks`` blocks, ``[rows, bytes]``; of several matrices, one after another.

    Row i is Hugging Face's row ``places[i]``; None: row i.
    """

    data: np.ndarray
    num_blocks: int
    places: np.ndarray | None


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """Tensors that may be stored in blocks of few bits."""

    def kind(self, name: str) -> str | None:
        """Return the name of the blocks of a tensor; None for plain numbers."""
        ...

    def blocks(self, name: str) -> BlockRows | None:
        """Return a tensor's blocks, None if its values are not those that the blocks alone stand for."""
        ...


class StoredForm(NamedTuple):
    """How a tensor is stored in few bits; ``is_transposed`` where as plain numbers it is ``[in, out]``."""

    form: Format
    is_transposed: bool = False


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """Tensors of which some are stored in few bits, and become parameters so."""

    def forms(self) -> Mapping[str, StoredForm | None]:
        """Return the form of every tensor in few bits by its name, None if there is none of its kind.

        Reads no codes.
        """
        ...

    def quantized(self, name: str) -> QuantizedArray:
        """Read a tensor in few bits, of NumPy's arrays; its rows are outputs, of several kernels one after another."""
        ...


def widened(source: QuantizedSource, name: str, dtype: np.dtype) -> np.ndarray:
    """Read a tensor in few bits as plain numbers."""
    rows, stored = source.quantized(name).dequantize(), source.forms()[name]
    rows = rows.T if stored is not None and stored.is_transposed else rows
    return rows.reshape(source.shapes()[name]).astype(dtype)


@runtime_checkable
class SparingSource(TensorSource, Protocol):
    """Tensors of which some may be left out."""

    def is_spare(self, name: str) -> bool:
        """Whether a tensor that a model has no place for changes nothing."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose weights have not been read.

    ``config`` is in the form of Hugging Face's ``config.json`` whatever the format; ``folder`` holds the tokenizer's
    files where there is one; ``gguf_metadata`` holds a GGUF file's key-value section, vocabulary included;
    ``llama2c_file`` is a llama2.c checkpoint, whose tokenizer stands beside it; ``converted_files`` are all those whose
    bytes take long to become tensors; ``rounded_from`` is the fingerprint of the weights before they were rounded.
    ``quantized_by`` says how a published checkpoint's weights were quantized, ``notice`` what of that is not followed.
    ``left_out`` are tensors that are there and not this model's: those of layers that are not wanted. ``folded`` are
    the factors that a method folded into the weights when it rounded them.
    """

    origin: str
    config: Mapping[str, Any]
    tensors: TensorSource
    folder: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None
    llama2c_file: Path | None = None
    converted_files: tuple[Path, ...] = ()
    rounded_from: str | None = None
    quantized_by: str | None = None
    notice: str | None = None
    left_out: frozenset[str] = frozenset()
    folded: Folded | None = None
