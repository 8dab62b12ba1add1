"""GGUF files: llama.cpp's checkpoints, in one file or in parts, dequantised one tensor at a time."""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.refused import WHAT
from jaxinfer.checkpoint.gguf.architectures.registry import ARCHITECTURES
from jaxinfer.checkpoint.gguf.blocks import dequantize_rows
from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.header import quote
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.checkpoint.gguf.names import StoredTensor, made_tensors, place_tensors
from jaxinfer.checkpoint.gguf.parts import read_parts
from jaxinfer.checkpoint.source import BlockRows, Checkpoint
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

_SLAB_BYTES = 1 << 22
_PLAIN_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one by any of them: checks the headers, leaves the weights on disk.

    Raises :class:`CheckpointNotFound`, :class:`InvalidCheckpoint` for a damaged file, and :class:`UnsupportedModel` for
    an architecture, a tensor type or a metadata key that is not implemented.
    """
    origin = str(path)
    header = read_parts(path)
    architecture = _find_architecture(origin, header.metadata)
    reader = MetadataReader(origin, header.metadata, architecture.name)
    divisors = {
        name: _read(StoredTensor(header.tensors[name]), np.dtype(np.float32))
        for name in architecture.rope_divisors
        if name in header.tensors
    }
    config = reader.finish(architecture.translate(reader, FileTensors(header.tensors.keys(), divisors)))
    placed = place_tensors(origin, header.tensors, architecture, config)
    if architecture.arrays is not None:
        placed |= made_tensors(architecture.arrays(reader, config))
    return Checkpoint(origin, config, GGUFTensors(placed), gguf_metadata=header.metadata, converted_files=header.paths)


class GGUFTensors:
    """The tensors of a GGUF model under Hugging Face names, in Hugging Face's row order."""

    def __init__(self, tensors: Mapping[str, StoredTensor]):
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype that holds a tensor without loss; None for a quantised tensor."""
        stored = self._tensors[name]
        # What is subtracted or multiplied is so in float32, and the result may need all of its bits.
        kind = "F32" if stored.is_changed else stored.entry.kind.name
        return _PLAIN_DTYPES.get(kind) if stored.entry.kind.name in _PLAIN_DTYPES else None

    def kind(self, name: str) -> str | None:
        """Return the name of the blocks of a tensor; None for plain numbers."""
        kind = self._tensors[name].entry.kind.name
        return None if kind in _PLAIN_DTYPES else kind

    def blocks(self, name: str) -> BlockRows | None:
        """Return a tensor's blocks; None where Hugging Face's rows are not the file's, or their values are changed."""
        stored = self._tensors[name]
        entry = stored.entry
        if stored.transposed or stored.is_changed or len(entry.shape) < 2 or self.kind(name) is None:
            return None
        *lead, width = entry.shape
        raw = np.frombuffer(entry.data, np.uint8, entry.num_bytes, entry.offset).reshape(math.prod(lead), -1)
        num_blocks = width // GGML_QUANT_SIZES[entry.kind][0]
        return BlockRows(raw, num_blocks, stored.places(len(raw)))

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as ``dtype``, through float32; a read-only view of the file if that holds this dtype."""
        return _read(self._tensors[name], np.dtype(dtype))


def _find_architecture(origin: str, metadata: Mapping[str, Any]) -> Architecture:
    name, kind = metadata.get("general.architecture"), metadata.get("general.type")
    if not isinstance(name, str):
        raise InvalidCheckpoint(f"{origin}: metadata key general.architecture is missing; convert the model again")
    if kind not in (None, "model"):
        raise UnsupportedModel(f"{origin}: general.type is {quote(kind)}; give the file of a whole model")
    if name in WHAT:
        raise UnsupportedModel(f"{origin}: GGUF architecture {quote(name)} is not supported: it is {WHAT[name]}")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{origin}: GGUF architecture {quote(name)} is not implemented; known: {known}")
    return ARCHITECTURES[name]


def _read(stored: StoredTensor, dtype: np.dtype) -> np.ndarray:
    """Convert a slab of rows at a time, so that float32 temporaries stay small beside the result."""
    entry = stored.entry
    raw = np.frombuffer(entry.data, np.uint8, entry.num_bytes, entry.offset)
    plain = entry.kind.name in _PLAIN_DTYPES and _PLAIN_DTYPES[entry.kind.name] == dtype
    if plain and not stored.is_reordered and not stored.is_changed:
        found = raw.view(dtype).reshape(entry.shape)
        return found.T if stored.transposed else found
    width = entry.shape[-1]
    rows = raw.reshape(math.prod(entry.shape[:-1]), -1)
    result = np.empty(entry.shape, dtype)
    # A bias is one row of blocks, but rotary order permutes its only axis.
    flat = result.reshape(-1, width if result.ndim > 1 else 1)
    places = stored.places(len(flat))
    step = max(1, _SLAB_BYTES // (4 * width))
    lines = width // flat.shape[1]  # rows of the result per row of the file

    def convert(start: int) -> None:
        # Scales and weights may be infinite or NaN; then the results are too.
        with np.errstate(all="ignore"):
            values = dequantize_rows(rows[start : start + step], entry.kind).reshape(-1, flat.shape[1])
            if stored.shift:
                values = values - np.float32(stored.shift)
            if stored.scale != 1.0:
                values = values * np.float32(stored.scale)
            span = slice(start * lines, start * lines + len(values))
            flat[span if places is None else places[span]] = values

    # NumPy releases the interpreter's lock, so threads run in parallel.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(convert, range(0, len(rows), step)))
    return result.T if stored.transposed else result
