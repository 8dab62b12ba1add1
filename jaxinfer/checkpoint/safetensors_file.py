"""One safetensors file, read lazily through a memory map."""

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
)
# What tensors of codes are made of.
CODES: Mapping[str, np.dtype] = MappingProxyType(
    {
        **{kind: np.dtype(f"{kind[0].lower()}{int(kind[1:]) // 8}") for kind in ("I8", "U8", "I32", "I64")},
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    }
)
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Tensors of one ``.safetensors`` file; raises :class:`InvalidCheckpoint` if its header or length is wrong.

    The file may also hold those of `CODES` that ``codes`` names; the caller knows what they stand for.
    """

    def __init__(self, path: Path, codes: Iterable[str] = ()):
        self._path = path
        self._dtypes = {**_DTYPES, **{kind: CODES[kind] for kind in codes}}
        _validate(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = _LENGTH_BYTES + int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        header = json.loads(self._map[_LENGTH_BYTES:start])
        self._metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._entries = {name: self._entry(name, fields, start) for name, fields in header.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def metadata(self) -> dict[str, str]:
        """Return what the header says besides the tensors."""
        return self._metadata

    def stored_dtype(self, name: str) -> np.dtype:
        """Return the dtype in which a tensor is stored."""
        kind = self._entries[name].dtype
        if kind not in self._dtypes:
            known = ", ".join(self._dtypes)
            raise InvalidCheckpoint(f"{self._path}: tensor {name} has type {kind}; convert it to one of {known}")
        return self._dtypes[kind]

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as ``dtype``; a read-only view of the file if that holds this dtype."""
        entry, stored = self._entries[name], self.stored_dtype(name)
        flat = np.frombuffer(self._map, stored, math.prod(entry.shape), entry.begin)
        return flat.reshape(entry.shape).astype(dtype, copy=False)

    def _entry(self, name: str, fields: Mapping[str, Any], start: int) -> _Entry:
        begin, end = fields["data_offsets"]
        entry = _Entry(fields["dtype"], tuple(fields["shape"]), start + begin, start + end)
        stored = self._dtypes.get(entry.dtype)
        if entry.end > len(self._map) or (
            stored is not None and math.prod(entry.shape) * stored.itemsize != entry.end - entry.begin
        ):
            raise InvalidCheckpoint(f"{self._path}: tensor {name} does not fit its offsets; download the file again")
        return entry


def _validate(path: Path) -> None:
    """Check the header with the safetensors library: its length, JSON, shapes, and offsets that tile the file."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidCheckpoint(f"{path}: not a valid safetensors file ({reason}); download it again") from None
