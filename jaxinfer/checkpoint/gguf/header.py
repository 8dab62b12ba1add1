"""Parses a GGUF file's key-value section and tensor table; checks every length against the file before use."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
)

_VERSIONS = (2, 3)
_SCALARS: Mapping[int, str] = MappingProxyType(
    {
        GGUFValueType.UINT8: "B",
        GGUFValueType.INT8: "b",
        GGUFValueType.UINT16: "H",
        GGUFValueType.INT16: "h",
        GGUFValueType.UINT32: "I",
        GGUFValueType.INT32: "i",
        GGUFValueType.FLOAT32: "f",
        GGUFValueType.BOOL: "?",
        GGUFValueType.UINT64: "Q",
        GGUFValueType.INT64: "q",
        GGUFValueType.FLOAT64: "d",
    }
)
_KINDS: Mapping[int, GGMLQuantizationType] = MappingProxyType({int(kind): kind for kind in GGMLQuantizationType})
# Types that were removed from the format, and from the gguf package with their names.
_FORMER_KINDS: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
# A damaged length that still fits in a large file must not create gigabytes of Python objects. No vocabulary with its
# merges has more elements, and no template or embedded tokenizer.json has more bytes.
_MAX_ARRAY_ELEMENTS = 1 << 22
_MAX_STRING_BYTES = 1 << 26
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor: ``shape`` slowest axis first, ``offset`` in bytes from the start of file ``data``."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    data: mmap | bytes = field(repr=False, compare=False)


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself before the weights begin; ``tensors`` go by the file's own names.

    ``paths`` are the files that it was read from.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    paths: tuple[Path, ...] = ()


def quote(value: object) -> str:
    """Format a value from a file so that it fits in a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def read_header(origin: str, data: mmap | bytes) -> Header:
    """Parse a whole GGUF file's header; ``origin`` names the file in errors.

    Raises :class:`InvalidCheckpoint` for a damaged file and :class:`UnsupportedModel` for a tensor type outside
    ``SUPPORTED_TYPES``.
    """
    cursor = _Cursor(origin, data)
    num_tensors, num_pairs = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("the name of a metadata key")
        if key in metadata:
            raise cursor.damaged(f"metadata key {quote(key)} occurs twice")
        metadata[key] = _read_value(cursor, cursor.scalar("I", f"key {quote(key)}"), f"key {quote(key)}")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    # The format asks for a multiple of 8. It also lets float32 weights be used directly from the memory map.
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {quote(alignment)}, not a power of two of at least 8")
    entries: dict[str, TensorEntry] = {}
    for _ in range(num_tensors):
        name = cursor.string("the tensor table")
        if name in entries:
            raise cursor.damaged(f"tensor {quote(name)} occurs twice")
        entries[name] = _read_tensor_entry(cursor, name, alignment)
    return Header(metadata, _place(cursor, entries, alignment))


class _Cursor:
    """A position in the file that cannot move past the end."""

    def __init__(self, origin: str, data: mmap | bytes):
        self.origin = origin
        self.data = data
        self.size = len(data)
        self.at = 0
        self.array_elements = 0

    def damaged(self, what: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.origin}: damaged GGUF file: {what}; download it again")

    def truncated(self, inside: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(
            f"{self.origin}: the GGUF file is truncated or damaged: its {self.size} bytes end inside {inside}; "
            "download it again"
        )

    def require(self, num_bytes: int, inside: str) -> None:
        if num_bytes > self.size - self.at:
            raise self.truncated(inside)

    def scalar(self, code: str, inside: str) -> Any:
        num_bytes = struct.calcsize("<" + code)
        self.require(num_bytes, inside)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += num_bytes
        return value

    def string(self, inside: str) -> str:
        length = self.scalar("Q", inside)
        self.require(length, inside)
        if length > _MAX_STRING_BYTES:
            raise self.damaged(f"a string of {length} bytes in {inside}")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"a string in {inside} is not UTF-8") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata pairs."""
    if cursor.data[:4] != b"GGUF"[: cursor.size] or not cursor.size:
        start = quote(bytes(cursor.data[:4]))
        raise InvalidCheckpoint(f"{cursor.origin}: not a GGUF file: it starts with {start}; give a .gguf file")
    cursor.require(4, "the magic number")
    cursor.at = 4
    version = cursor.scalar("I", "the version")
    if version in (v << 24 for v in _VERSIONS):
        raise InvalidCheckpoint(f"{cursor.origin}: a big-endian GGUF file cannot be read; convert it to little-endian")
    if version not in _VERSIONS:
        raise InvalidCheckpoint(
            f"{cursor.origin}: GGUF version {version} cannot be read; convert the model again (to version 2 or 3)"
        )
    num_tensors, num_pairs = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")
    cursor.require(num_pairs * _MIN_PAIR_BYTES, f"{num_pairs} metadata pairs")
    cursor.require(num_tensors * _MIN_TENSOR_BYTES, f"the table of {num_tensors} tensors")
    return num_tensors, num_pairs


def _read_value(cursor: _Cursor, kind: int, inside: str, depth: int = 0) -> Any:
    if kind == GGUFValueType.STRING:
        return cursor.string(inside)
    if kind == GGUFValueType.ARRAY:
        return _read_array(cursor, inside, depth + 1)
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind], inside)
    raise cursor.damaged(f"{inside} has the unknown value type {kind}")


def _read_array(cursor: _Cursor, inside: str, depth: int) -> list[Any]:
    if depth > _MAX_ARRAY_DEPTH:
        raise cursor.damaged(f"{inside} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
    kind, count = cursor.scalar("I", inside), cursor.scalar("Q", inside)
    code = _SCALARS.get(kind)
    # A string or an inner array takes at least 8 bytes, for its own length.
    cursor.require(count * (struct.calcsize("<" + code) if code else 8), f"the {count} elements of {inside}")
    cursor.array_elements += count
    if cursor.array_elements > _MAX_ARRAY_ELEMENTS:
        raise cursor.damaged(f"{inside} claims {count} elements")
    if code is None:
        return [_read_value(cursor, kind, inside, depth) for _ in range(count)]
    layout = f"<{count}{code}"
    values = list(struct.unpack_from(layout, cursor.data, cursor.at))
    cursor.at += struct.calcsize(layout)
    return values


def _read_tensor_entry(cursor: _Cursor, name: str, alignment: int) -> TensorEntry:
    """Read one row of the tensor table; its offset is still relative to the start of the weights."""
    where = f"tensor {quote(name)}"
    num_dims = cursor.scalar("I", where)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"{where} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q", where) for _ in range(num_dims))[::-1]
    kind, offset = cursor.scalar("I", where), cursor.scalar("Q", where)
    if kind not in _KINDS or _KINDS[kind].name not in SUPPORTED_TYPES:
        label = _KINDS[kind].name if kind in _KINDS else _FORMER_KINDS.get(kind, f"type number {kind}")
        raise UnsupportedModel(
            f"{cursor.origin}: {where} is stored as {label}, which cannot be read; "
            f"use a file with {', '.join(SUPPORTED_TYPES)} tensors"
        )
    block_elements, block_bytes = GGML_QUANT_SIZES[_KINDS[kind]]
    if not all(shape) or shape[-1] % block_elements:
        raise cursor.damaged(f"{where} has the shape {quote(shape)}, impossible for {_KINDS[kind].name}")
    if offset % alignment:
        raise cursor.damaged(f"{where} starts at {offset}, not a multiple of the alignment {alignment}")
    return TensorEntry(_KINDS[kind], shape, offset, math.prod(shape) // block_elements * block_bytes, cursor.data)


def _place(cursor: _Cursor, entries: Mapping[str, TensorEntry], alignment: int) -> dict[str, TensorEntry]:
    """Make offsets absolute; check that the weights are inside the file and do not overlap."""
    start = -(-cursor.at // alignment) * alignment
    placed = {}
    for name, entry in entries.items():
        entry = replace(entry, offset=start + entry.offset)
        if entry.offset + entry.num_bytes > cursor.size:
            raise cursor.truncated(f"tensor {quote(name)}")
        placed[name] = entry
    end, before = start, ""
    for name, entry in sorted(placed.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise cursor.damaged(f"tensors {quote(before)} and {quote(name)} overlap")
        end, before = entry.offset + entry.num_bytes, name
    return placed
