"""A value head on disk: ``value_head.json``, a `ValueHeadDescription`, and ``value_head.safetensors``.

Tensors are named by their path in `jaxinfer.models.value_head`: ``inner.kernel`` and so on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.drafters.shipped import check_fingerprint
from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.value_head import value_head_shapes
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend

_DESCRIPTION, _WEIGHTS = "value_head.json", "value_head.safetensors"


@dataclass(frozen=True)
class ValueHeadDescription:
    """Describes a head and the model whose hidden states it reads; ``base`` names the model for the reader."""

    model_dim: int
    inner: int
    base: str | None = None
    base_fingerprint: str | None = None


def read_value_head(
    folder: Path,
    config: DecoderConfig,
    backend: Backend,
    fingerprint: Callable[[], str | None] = lambda: None,
) -> Params:
    """Read the value head of a model of this config, in its dtype.

    Raises :class:`CheckpointNotFound` or :class:`InvalidCheckpoint` for files that are missing or damaged, and for a
    head that was trained on other weights than those of ``fingerprint``.
    """
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder}: no such folder of a value head")
    for name in (_DESCRIPTION, _WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointNotFound(f"{folder / name}: no such file; a value head is {_DESCRIPTION} and {_WEIGHTS}")
    description = _read_description(folder / _DESCRIPTION)
    if description.model_dim != config.model_dim:
        raise InvalidCheckpoint(
            f"{folder}: the value head reads {description.model_dim} channels, but hidden states have "
            f"{config.model_dim}: load the model that it was trained on"
        )
    check_fingerprint(folder, description.base_fingerprint, fingerprint)
    return _read_weights(folder / _WEIGHTS, description, backend)


def write_value_head(
    folder: Path,
    head: Params,
    *,
    base: str | None = None,
    base_fingerprint: str | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> ValueHeadDescription:
    """Write a value head to a new folder, in float32; ``beside`` are further files, their texts by name.

    ``overwrite`` replaces a folder of a value head.
    """
    inner, model_dim = head["inner"]["kernel"].shape
    description = ValueHeadDescription(model_dim, inner, base, base_fingerprint)
    tensors = {
        f"{part}.{name}": np.ascontiguousarray(array, np.float32)
        for part, own in head.items()
        for name, array in own.items()
    }
    with new_folder(folder, _DESCRIPTION if overwrite else None) as new:
        (new / _DESCRIPTION).write_text(json.dumps(asdict(description)) + "\n")
        save_file(tensors, new / _WEIGHTS)
        for name, text in beside.items():
            (new / name).write_text(text, encoding="utf-8")
    return description


def _read_description(path: Path) -> ValueHeadDescription:
    settings = read_json_object(path)
    known = [field.name for field in fields(ValueHeadDescription)]
    if unknown := sorted(settings.keys() - set(known)):
        raise InvalidCheckpoint(f"{path}: unknown field {unknown[0]}; the fields are {', '.join(known)}")
    for name in ("model_dim", "inner"):
        value = settings.get(name)
        if type(value) is not int or not 1 <= value <= 1 << 24:
            raise InvalidCheckpoint(f"{path}: {name} must be a whole number of 1 or more, not {value!r}")
    for name in ("base", "base_fingerprint"):
        if not isinstance(settings.get(name), str | None):
            raise InvalidCheckpoint(f"{path}: {name} must be text or null, not {settings[name]!r}")
    return ValueHeadDescription(**settings)


def _read_weights(path: Path, description: ValueHeadDescription, backend: Backend) -> Params:
    tensors, shapes = SafetensorsFile(path), value_head_shapes(description.model_dim, description.inner)
    found = tensors.shapes()
    expected = {f"{part}.{name}": shape for part, own in shapes.items() for name, shape in own.items()}
    if missing := [name for name in expected if name not in found]:
        raise InvalidCheckpoint(f"{path}: tensor {missing[0]} is missing")
    if extra := sorted(found.keys() - expected.keys()):
        raise InvalidCheckpoint(f"{path}: {_DESCRIPTION} leaves no place for tensor {extra[0]}")
    head: Params = {}
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} has shape {list(found[name])}, but {_DESCRIPTION} makes it {list(shape)}"
            )
        array = tensors.read(name, np.dtype(np.float32))
        if not np.isfinite(array).all():
            raise InvalidCheckpoint(f"{path}: tensor {name} holds numbers that are not finite; train the head again")
        part, last = name.split(".")
        head.setdefault(part, {})[last] = jnp.array(array)
    return head
