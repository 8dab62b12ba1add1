"""The marker of a converted folder, ``jaxinfer.json``: ties weights to their config, and says what is in few bits."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.orbax.layout import CONFIG, DTYPES, INTEGERS, MARKER, WEIGHTS, StoredTensor
from jaxinfer.checkpoint.orbax.parts import FewBitsTensor, describe_form, read_form
from jaxinfer.errors import InvalidCheckpoint

# Folders without anything in few bits are of the first version, which older readers know.
_FORMAT, _PLAIN, _IN_FEW_BITS = "jaxinfer-orbax", 1, 2


@dataclass(frozen=True)
class Marker:
    """The content of ``jaxinfer.json``; ``source`` is the format that the weights came from.

    ``forms`` are the tensors in few bits, whose parts are among ``tensors``; ``rounded_from`` is the fingerprint of the
    weights before.
    """

    source: str
    tensors: Mapping[str, StoredTensor]
    forms: Mapping[str, FewBitsTensor] = field(default_factory=dict)
    rounded_from: str | None = None


def describe_marker(marker: Marker, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``jaxinfer.json``."""
    tensors = {name: asdict(tensor) for name, tensor in marker.tensors.items()}
    forms = {name: describe_form(tensor) for name, tensor in marker.forms.items()}
    few_bits = {"forms": forms, "rounded_from": marker.rounded_from} if forms else {}
    return {
        "format": _FORMAT,
        "version": _IN_FEW_BITS if forms else _PLAIN,
        "source": marker.source,
        "digest": _digest(config, tensors, few_bits),
        "tensors": tensors,
        **few_bits,
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
    if version not in (_PLAIN, _IN_FEW_BITS):
        raise InvalidCheckpoint(
            f"{path}: version {version!r:.20} of the format cannot be read, only {_PLAIN} and {_IN_FEW_BITS}; "
            "convert the model again"
        )
    try:
        tensors = {name: _read_tensor(**fields) for name, fields in content["tensors"].items()}
        few_bits = {key: content[key] for key in ("forms", "rounded_from")} if version == _IN_FEW_BITS else {}
        forms = {name: read_form(name, tensors, **fields) for name, fields in few_bits.get("forms", {}).items()}
        parts = {part for name, tensor in forms.items() for part in tensor.parts(name)}
        if any(tensor.dtype in INTEGERS and name not in parts for name, tensor in tensors.items()):
            raise ValueError("integers that belong to nothing")
        rounded_from = few_bits.get("rounded_from")
        marker = Marker(str(content["source"]), tensors, forms, None if rounded_from is None else str(rounded_from))
        fits = content["digest"] == _digest(config, content["tensors"], few_bits)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidCheckpoint(f"{path}: damaged; convert the model again") from None
    if not fits:
        raise InvalidCheckpoint(
            f"{folder}: {CONFIG} and {MARKER} do not belong together: an Orbax folder of another model, "
            "or edited since; convert the model again"
        )
    return marker


def _digest(config: Mapping[str, Any], tensors: Mapping[str, Any], few_bits: Mapping[str, Any]) -> str:
    text = json.dumps({"config": config, "tensors": tensors, **few_bits}, sort_keys=True)
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
