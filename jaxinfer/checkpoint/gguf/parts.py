"""Reads the headers of a GGUF model in one file, or in several files written by llama.cpp's gguf-split."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.gguf.header import Header, TensorEntry, quote, read_header
from jaxinfer.checkpoint.mapped_file import map_file
from jaxinfer.errors import InvalidCheckpoint

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.gguf)", re.IGNORECASE)
_COUNT, _NUMBER, _NUM_TENSORS = "split.count", "split.no", "split.tensors.count"


def read_parts(path: Path) -> Header:
    """Map a GGUF file, and all other parts if it is split, and read their headers as one.

    The metadata is the first part's. Raises :class:`CheckpointNotFound`, or :class:`InvalidCheckpoint` with the file's
    name if a part is damaged, missing or of another model.
    """
    header = _read_one(path)
    count = header.metadata.get(_COUNT)
    if count in (None, 0, 1):
        return replace(header, paths=(path,))
    paths = _list_parts(path, header, count)
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, TensorEntry] = {}
    homes: dict[str, Path] = {}
    for index, part_path in enumerate(paths):
        part = header if part_path == path else _read_one(part_path)
        _check_part(part_path, part.metadata, metadata or part.metadata, index, count)
        metadata = metadata or part.metadata
        for name in part.tensors.keys() & tensors.keys():
            raise InvalidCheckpoint(
                f"{part_path}: tensor {quote(name)} is also in {homes[name].name}; fetch all parts of one model again"
            )
        tensors.update(part.tensors)
        homes.update(dict.fromkeys(part.tensors, part_path))
    stated = metadata.get(_NUM_TENSORS)
    if stated is not None and stated != len(tensors):
        raise InvalidCheckpoint(
            f"{path}: its {count} parts hold {len(tensors)} tensors, not the {quote(stated)} of {_NUM_TENSORS} in "
            f"{paths[0].name}; fetch all parts of one model again"
        )
    return Header(metadata, tensors, tuple(paths))


def _read_one(path: Path) -> Header:
    return read_header(str(path), map_file(path))


def _list_parts(path: Path, header: Header, count: Any) -> list[Path]:
    """Return the paths of all parts, which must exist, from the name of one."""
    number = header.metadata.get(_NUMBER)
    if type(count) is not int or type(number) is not int or not 0 <= number < count < 1 << 16:
        raise InvalidCheckpoint(
            f"{path}: damaged split GGUF: it says to be part {quote(number)}, counted from 0, of {quote(count)}; "
            "download it again"
        )
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["number"]) != number + 1 or int(match["count"]) != count:
        raise InvalidCheckpoint(
            f"{path}: it is part {number + 1} of {count} of a split GGUF, and its name must say so: "
            f"rename it to NAME-{number + 1:05}-of-{count:05}.gguf, beside the other parts"
        )
    names = [f"{match['stem']}-{index + 1:05}-of-{match['count']}{match['suffix']}" for index in range(count)]
    paths = [path.with_name(name) if name != path.name else path for name in names]
    for one in paths:
        if not one.is_file():
            raise InvalidCheckpoint(f"{one}: this part of a split GGUF of {count} parts is missing; fetch it too")
    return paths


def _check_part(path: Path, found: Mapping[str, Any], first: Mapping[str, Any], index: int, count: int) -> None:
    """Raise an error for a part that has another number or contradicts the first part."""
    for key, expected in ((_COUNT, count), (_NUMBER, index)):
        if found.get(key) != expected:
            raise InvalidCheckpoint(
                f"{path}: {key} is {quote(found.get(key))}, not {expected}: it is a part of another model; "
                "fetch all parts of one model again"
            )
    # Parts after the first hold little more than their number; values that they repeat must agree.
    for key, value in found.items():
        if key not in (_COUNT, _NUMBER) and key in first and first[key] != value:
            raise InvalidCheckpoint(
                f"{path}: {quote(key)[1:-1]} is {quote(value)}, but {quote(first[key])} in the first part: it is a "
                "part of another model; fetch all parts of one model again"
            )
