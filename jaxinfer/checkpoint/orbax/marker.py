"""The marker of a converted folder, ``jaxinfer.json``: ties weights to their config, and says what is in few bits."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.orbax.layout import CONFIG, DTYPES, INTEGERS, MARKER, WEIGHTS, StoredTensor
from jaxinfer.checkpoint.orbax.parts import FewBitsTensor, describe_form, factor_tensor, read_form
from jaxinfer.errors import InvalidCheckpoint

# Folders are of the first version that can say what they hold, which the most readers know. The second one does not say
# what was folded into weights that a model rounded.
_FORMAT, _PLAIN, _IN_FEW_BITS, _FOLDED = "jaxinfer-orbax", 1, 2, 3
_ADDED: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {_PLAIN: (), _IN_FEW_BITS: ("forms", "rounded_from"), _FOLDED: ("forms", "rounded_from", "folded")}
)


@dataclass(frozen=True)
class Marker:
    """The content of ``jaxinfer.json``; ``source`` is the format that the weights came from.

    ``forms`` are the tensors in few bits, whose parts are among ``tensors``; ``rounded_from`` is the fingerprint of the
    weights before. ``folded`` are the names of the factors that were folded into them, whose tensors are there too;
    None: not known.
    """

    source: str
    tensors: Mapping[str, StoredTensor]
    forms: Mapping[str, FewBitsTensor] = field(default_factory=dict)
    rounded_from: str | None = None
    folded: tuple[str, ...] | None = ()


def describe_marker(marker: Marker, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``jaxinfer.json``."""
    tensors = {name: asdict(tensor) for name, tensor in marker.tensors.items()}
    forms = {name: describe_form(tensor) for name, tensor in marker.forms.items()}
    version = _IN_FEW_BITS if forms else _PLAIN
    if marker.folded != _folded_before(version, marker.rounded_from):
        version = _FOLDED
    folded = None if marker.folded is None else list(marker.folded)
    said = {"forms": forms, "rounded_from": marker.rounded_from, "folded": folded}
    added = {key: said[key] for key in _ADDED[version]}
    return {
        "format": _FORMAT,
        "version": version,
        "source": marker.source,
        "digest": _digest(config, tensors, added),
        "tensors": tensors,
        **added,
    }


def read_marker(folder: Path, config: Mapping[str, Any]) -> Marker:
    """Read ``jaxinfer.json``; raises :class:`InvalidCheckpoint` if it does not match ``config``."""
    path = folder / MARKER
    if not path.is_file():
        parent = folder.parent if folder.name == WEIGHTS and (folder.parent / MARKER).is_file() else None
        mend = f"give {parent}" if parent else "give a folder that jaxinfer convert wrote"
        raise InvalidCheckpoint(f"{folder}: an Orbax folder of another model or tool, without {MARKER}; {mend}")
    content = read_json_object(path)
    if content.get("format") != _FORMAT:
        raise InvalidCheckpoint(f"{path}: not written by jaxinfer convert; convert the model again")
    version = content.get("version")
    if type(version) is not int or version not in _ADDED:
        raise InvalidCheckpoint(
            f"{path}: version {version!r:.20} of the format cannot be read, only {', '.join(map(str, _ADDED))}; "
            "convert the model again"
        )
    try:
        tensors = {name: _read_tensor(**fields) for name, fields in content["tensors"].items()}
        added = {key: content[key] for key in _ADDED[version]}
        forms = {name: read_form(name, tensors, **fields) for name, fields in added.get("forms", {}).items()}
        parts = {part for name, tensor in forms.items() for part in tensor.parts(name)}
        if any(tensor.dtype in INTEGERS and name not in parts for name, tensor in tensors.items()):
            raise ValueError("integers that belong to nothing")
        rounded_from = added.get("rounded_from")
        rounded_from = None if rounded_from is None else str(rounded_from)
        folded = added.get("folded", _folded_before(version, rounded_from))
        if folded and any(tensors[factor_tensor(name)].dtype != "float32" for name in folded):
            raise ValueError(folded)
        marker = Marker(str(content["source"]), tensors, forms, rounded_from, None if folded is None else tuple(folded))
        fits = content["digest"] == _digest(config, content["tensors"], added)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidCheckpoint(f"{path}: damaged; convert the model again") from None
    if not fits:
        raise InvalidCheckpoint(
            f"{folder}: {CONFIG} and {MARKER} do not belong together: an Orbax folder of another model, "
            "or edited since; convert the model again"
        )
    return marker


def _folded_before(version: int, rounded_from: str | None) -> tuple[str, ...] | None:
    """Return what a folder of a version that does not say it has folded: nothing, if no model was rounded."""
    return None if version == _IN_FEW_BITS and rounded_from is not None else ()


def _digest(config: Mapping[str, Any], tensors: Mapping[str, Any], added: Mapping[str, Any]) -> str:
    text = json.dumps({"config": config, "tensors": tensors, **added}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_tensor(dtype: str, shape: list[int], box: list[int], checksums: list[int]) -> StoredTensor:
    if dtype not in DTYPES or len(shape) != len(box):
        raise ValueError(dtype)
    if not all(type(number) is int for number in (*shape, *box, *checksums)):
        raise ValueError(shape)
    if not all(1 <= step <= size for step, size in zip(box, shape)):
        raise ValueError(box)
    if len(checksums) != math.prod(-(-size // step) for size, step in zip(shape, box)):
        raise ValueError(checksums)
    return StoredTensor(dtype, tuple(shape), tuple(box), tuple(checksums))
