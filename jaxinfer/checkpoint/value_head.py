"""A value head on disk: ``value_head.json``, a `ValueHeadDescription`, and ``value_head.safetensors``.

Tensors are named by their path in `jaxinfer.models.value_head`: ``inner.kernel`` and so on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxinfer.checkpoint.described import Files, check_count, read_settings, read_tensors
from jaxinfer.checkpoint.drafters.shipped import check_fingerprint
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.value_head import value_head_shapes
from jaxinfer.notation import Params

_FILES = Files("a value head", "value_head.json", "value_head.safetensors")


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
    fingerprint: Callable[[], str | None] = lambda: None,
) -> Params:
    """Read the value head of a model of this config, in float32.

    Raises :class:`CheckpointNotFound` or :class:`InvalidCheckpoint` for files that are missing or damaged, and for a
    head that was trained on other weights than those of ``fingerprint``.
    """
    _FILES.check(folder)
    description = _read_description(folder / _FILES.description)
    if description.model_dim != config.model_dim:
        raise InvalidCheckpoint(
            f"{folder}: the value head reads {description.model_dim} channels, but hidden states have "
            f"{config.model_dim}: load the model that it was trained on"
        )
    check_fingerprint(folder, description.base_fingerprint, fingerprint)
    shapes = value_head_shapes(description.model_dim, description.inner)
    expected = {f"{part}.{name}": shape for part, own in shapes.items() for name, shape in own.items()}
    return read_tensors(folder, _FILES, expected, "float32", "the head")


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
        f"{part}.{name}": np.asarray(array, np.float32) for part, own in head.items() for name, array in own.items()
    }
    _FILES.write(folder, description, tensors, beside=beside, overwrite=overwrite)
    return description


def _read_description(path: Path) -> ValueHeadDescription:
    settings = read_settings(path, ValueHeadDescription)
    for name in ("model_dim", "inner"):
        check_count(path, name, settings.get(name))
    return ValueHeadDescription(**settings)
