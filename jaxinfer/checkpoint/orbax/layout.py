"""The content of a converted folder.

``config.json`` and the tokenizer's files are beside ``weights``, a checkpoint in Orbax's own format: a flat dictionary
of arrays under Hugging Face names. That format has checksums for its index but not for the weights, so the marker
``jaxinfer.json`` (`jaxinfer.checkpoint.orbax.marker`) holds them: one for each box of a tensor. A box is stored, read
and checked as a whole.
"""

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np

MARKER, CONFIG, WEIGHTS, GGUF_METADATA = "jaxinfer.json", "config.json", "weights", "gguf_metadata.json"
BOX_BYTES = 1 << 24
_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(kind)
        for name, kind in (
            ("float32", np.float32),
            ("bfloat16", ml_dtypes.bfloat16),
            ("float16", np.float16),
            ("float64", np.float64),
            ("int8", np.int8),
            ("uint8", np.uint8),
            ("uint16", np.uint16),
            ("int32", np.int32),
        )
    }
)
# Of parts of tensors in few bits.
INTEGERS = ("int8", "uint8", "uint16", "int32")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the weights: ``checksums`` are the CRC-32 of its boxes, in the order of `boxes`."""

    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    checksums: tuple[int, ...]

    def boxes(self) -> Iterator[tuple[slice, ...]]:
        """Yield the slices of the tensor's boxes, the last axis fastest; the boxes at the far ends may be smaller."""
        starts = (range(0, size, step) for size, step in zip(self.shape, self.box))
        for corner in itertools.product(*starts):
            yield tuple(
                slice(at, min(at + step, size)) for at, step, size in zip(corner, self.box, self.shape, strict=True)
            )


def is_orbax_folder(folder: Path) -> bool:
    """Tell whether a folder was converted, or is an Orbax checkpoint or a part of one."""
    if (folder / MARKER).is_file():
        return True
    if any((folder / name).is_file() for name in _SAFETENSORS):
        return False
    return any((place / name).is_file() for place in (folder, folder / WEIGHTS) for name in _ORBAX_FILES)


def choose_box(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a tensor's boxes, at most BOX_BYTES each: the shape that Orbax chooses for its chunks.

    Orbax cuts into equal parts only, so a tensor with a prime number of rows stays whole. If this choice differed from
    Orbax's, reading would still be correct, but would read chunks more than once.
    """
    box = list(shape)
    while math.prod(box) > BOX_BYTES // itemsize:
        axis = box.index(max(box))
        box[axis] = next(size for size in range(box[axis] - 1, 0, -1) if shape[axis] % size == 0)
    is_tiny = box != list(shape) and math.prod(box) * itemsize < BOX_BYTES // 16
    return shape if is_tiny else tuple(box)


def describe_tensor(array: np.ndarray) -> StoredTensor:
    """Cut a tensor into boxes and compute their checksums."""
    whole = StoredTensor(array.dtype.name, array.shape, choose_box(array.shape, array.dtype.itemsize), ())
    checksums = tuple(checksum(np.asarray(array[box])) for box in whole.boxes())
    return StoredTensor(whole.dtype, whole.shape, whole.box, checksums)


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def stored_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a stored tensor's ``dtype`` name."""
    return DTYPES[name]
