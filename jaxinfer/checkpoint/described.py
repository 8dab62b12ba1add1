"""A folder of a description in JSON and of the tensors that it accounts for: streams, heads, value heads.

Its own format, so that what it does not know is wrong, and every tensor has a place.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint
from jaxinfer.models.layers import put
from jaxinfer.notation import Params

# The largest count; any number is quickly written in JSON.
MOST = 1 << 24


class Files(NamedTuple):
    """The names of a description and of its weights, and ``what`` they are, for messages: ``"a value head"``."""

    what: str
    description: str
    weights: str

    def check(self, folder: Path) -> None:
        """Raise CheckpointNotFound unless both are in the folder."""
        if not folder.is_dir():
            raise CheckpointNotFound(f"{folder}: no such folder of {self.what}")
        for name in (self.description, self.weights):
            if not (folder / name).is_file():
                whole = f"{self.description} and {self.weights}"
                raise CheckpointNotFound(f"{folder / name}: no such file of {self.what}, which has {whole}")

    def write(
        self,
        folder: Path,
        description: Any,
        tensors: Mapping[str, Any],
        *,
        beside: Mapping[str, str],
        overwrite: bool,
    ) -> None:
        """Write a new folder; ``beside`` are other files, their texts by name; ``overwrite`` replaces such a folder."""
        with new_folder(folder, self.description if overwrite else None) as new:
            (new / self.description).write_text(json.dumps(asdict(description)) + "\n")
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, new / self.weights)
            for name, text in beside.items():
                (new / name).write_text(text, encoding="utf-8")


def read_settings(path: Path, kind: Any) -> dict[str, Any]:
    """Return what a description of a dataclass's fields holds, its ``base`` and ``base_fingerprint`` checked."""
    settings = read_json_object(path)
    known = [field.name for field in fields(kind)]
    if unknown := sorted(settings.keys() - set(known)):
        raise InvalidCheckpoint(f"{path}: unknown field {unknown[0]}; the fields are {', '.join(known)}")
    for name in ("base", "base_fingerprint"):
        if not isinstance(settings.get(name), str | None):
            raise InvalidCheckpoint(f"{path}: {name} must be text or null, not {settings[name]!r}")
    return settings


def check_count(path: Path, name: str, value: Any, least: int = 1) -> None:
    """Raise InvalidCheckpoint unless a value is a whole number of ``least`` or more."""
    if type(value) is not int or not least <= value <= MOST:
        raise InvalidCheckpoint(f"{path}: {name} must be a whole number of {least} or more, not {value!r}")


def read_tensors(
    folder: Path, files: Files, shapes: Mapping[str, tuple[int, ...]], dtype: str, trained_again: str
) -> Params:
    """Read tensors of these shapes, and no others, as a tree: their names are paths, parted by dots.

    Raises InvalidCheckpoint for those that are missing, too many, of another shape or not finite, which only what is
    ``trained_again`` mends.
    """
    path = folder / files.weights
    tensors = SafetensorsFile(path)
    found = tensors.shapes()
    if missing := [name for name in shapes if name not in found]:
        raise InvalidCheckpoint(f"{path}: tensor {missing[0]} is missing")
    if extra := sorted(found.keys() - shapes.keys()):
        raise InvalidCheckpoint(f"{path}: {files.description} leaves no place for tensor {extra[0]}")
    tree: Params = {}
    for name, shape in shapes.items():
        if tuple(found[name]) != shape:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} has shape {list(found[name])}, but {files.description} makes it {list(shape)}"
            )
        array = tensors.read(name, np.dtype(dtype))
        if not np.isfinite(array.astype(np.float32)).all():
            raise InvalidCheckpoint(
                f"{path}: tensor {name} holds numbers that are not finite; train {trained_again} again"
            )
        # Copied, because the file may change while the model is in use.
        put(tree, name, jnp.array(array))
    return tree
