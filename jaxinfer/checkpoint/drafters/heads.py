"""Drafting heads on disk: checkpoints of the Medusa project, and this library's own format, which can hold more.

Medusa: ``config.json`` and ``medusa_lm_head.safetensors``. Own format: ``heads.json`` with the fields of
`HeadsDescription`, ``heads.safetensors``, and optionally ``tree.json`` with a draft tree for these heads: paths of
ranks, the highest gain first. Both use the same tensor names: ``{head}.{block}.linear.weight``, ``.bias``,
``{head}.{block}.out.weight`` if the block is an MLP, and ``{head}.{blocks}.weight`` for a head's own output matrix. An
int8 matrix of the own format has a tensor of the same name plus ``_scale``: one factor for each of its rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.described import Files, read_settings
from jaxinfer.checkpoint.drafters.shipped import TREE, check_fingerprint
from jaxinfer.checkpoint.hf_folder import read_json_object, refuse_pickle
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, shown
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.heads import heads_width, is_conditioned
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend

_OWN, _OWN_WEIGHTS = "heads.json", "heads.safetensors"
_MEDUSA, _MEDUSA_WEIGHTS, _MEDUSA_PICKLE = "config.json", "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_SCALE = "_scale"
_PREFIX = re.compile(r"medusa_heads?\.")
_HEAD = re.compile(r"[0-9]{1,4}")
# Heads and their layers, and channels and tokens. No file holds more, but any number is quickly written in JSON.
_MOST, _WIDEST = 1024, 1 << 24


@dataclass(frozen=True)
class HeadsDescription:
    """Describes heads. ``conditioned``: they read the drafted tokens before theirs (Hydra).

    ``draft_ids`` are the token ids of the output rows, None if there is a row for each of ``vocab_size``. ``base``
    names, for the reader, the model that the heads were trained on; ``base_fingerprint`` identifies its weights
    (`jaxinfer.models.fingerprint`).
    """

    num_heads: int
    num_layers: int
    model_dim: int
    vocab_size: int
    conditioned: bool = False
    share_lm_head: bool = False
    draft_ids: tuple[int, ...] | None = None
    base: str | None = None
    base_fingerprint: str | None = None


def read_heads(
    folder: Path,
    config: DecoderConfig,
    backend: Backend,
    most: int | None = None,
    fingerprint: Callable[[], str | None] = lambda: None,
) -> Params:
    """Read heads for a model of this config, at most ``most`` of them, in the form of `models.drafters.heads`.

    Raises :class:`CheckpointNotFound` for missing files, and :class:`InvalidCheckpoint` for files that are damaged,
    pickled, or made for another width, another vocabulary or other weights than those of ``fingerprint``.
    """
    description, path = _describe(folder, config)
    tensors = SafetensorsFile(path, ["I8"])
    names = {_PREFIX.sub("", name, count=1): name for name in tensors.shapes()}
    shapes = {name: tensors.shapes()[stored] for name, stored in names.items() if not name.endswith(_SCALE)}
    _check_model(folder, description, config)
    check_fingerprint(folder, description.base_fingerprint, fingerprint)
    _check_names(path, description, shapes)
    dtype = np.dtype(backend.param_dtype)

    def read(name: str, shape: tuple[int, ...]) -> jax.Array:
        if tuple(shapes[name]) != shape:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} has shape {list(shapes[name])}, but the model needs {list(shape)}"
            )
        scale = names.get(name + _SCALE)
        if scale is not None:
            scales = tensors.read(scale, np.dtype(np.float32))
            if scales.shape != shape[:1]:
                raise InvalidCheckpoint(f"{path}: tensor {scale} has shape {list(scales.shape)}, not {list(shape[:1])}")
            return jnp.array((tensors.read(names[name], np.dtype(np.float32)) * scales[:, None]).astype(dtype))
        # Copied, because the file may change while the model is in use.
        return jnp.array(tensors.read(names[name], dtype))

    count = description.num_heads if most is None else min(most, description.num_heads)
    head_params: Params = {"heads": tuple(_read_head(description, index, read, shapes) for index in range(count))}
    if description.draft_ids is not None:
        head_params["ids"] = jnp.asarray(description.draft_ids, jnp.int32)
    return head_params


def heads_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `read_heads` reads, or that choose a tree for them."""
    names = (_OWN, _OWN_WEIGHTS, _MEDUSA, _MEDUSA_WEIGHTS, TREE)
    return [folder / name for name in names if (folder / name).is_file()]


def write_heads(
    folder: Path,
    head_params: Params,
    vocab_size: int,
    *,
    base: str | None = None,
    base_fingerprint: str | None = None,
    in_int8: bool = False,
    beside: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> HeadsDescription:
    """Write heads to a new folder in this library's own format; a shared ``"output"`` is the model's, not written.

    ``in_int8`` stores each row of a matrix as int8 values times one scale. ``beside`` are further files, their texts by
    name. ``overwrite`` replaces a folder of heads.
    """
    heads = head_params["heads"]
    tensors: dict[str, Any] = {}
    for index, head in enumerate(heads):
        for layer, block in enumerate(head["blocks"]):
            tensors[f"{index}.{layer}.linear.weight"] = block["kernel"]
            tensors[f"{index}.{layer}.linear.bias"] = block["bias"]
            if "out" in block:
                tensors[f"{index}.{layer}.out.weight"] = block["out"]
        if "output" in head:
            tensors[f"{index}.{len(head['blocks'])}.weight"] = head["output"]["kernel"]
    description = HeadsDescription(
        num_heads=len(heads),
        num_layers=len(heads[0]["blocks"]),
        model_dim=heads_width(head_params),
        vocab_size=vocab_size,
        conditioned=is_conditioned(head_params),
        share_lm_head="output" not in heads[0],
        draft_ids=tuple(np.asarray(head_params["ids"]).tolist()) if "ids" in head_params else None,
        base=base,
        base_fingerprint=base_fingerprint,
    )
    if in_int8:
        tensors = dict(stored for name, array in tensors.items() for stored in _in_int8(name, array))
    Files("heads", _OWN, _OWN_WEIGHTS).write(folder, description, tensors, beside=beside, overwrite=overwrite)
    return description


def _in_int8(name: str, array: Any) -> Iterator[tuple[str, np.ndarray]]:
    numbers = np.asarray(array, np.float32)
    if numbers.ndim < 2:
        yield name, np.asarray(array)
        return
    scales = np.maximum(np.abs(numbers).max(axis=1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    yield name, np.rint(numbers / scales).astype(np.int8)
    yield name + _SCALE, scales[:, 0]


def _describe(folder: Path, config: DecoderConfig) -> tuple[HeadsDescription, Path]:
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder}: no such folder of heads")
    if (folder / _OWN).is_file():
        return _read_own(folder / _OWN), _existing(folder / _OWN_WEIGHTS)
    if not (folder / _MEDUSA_WEIGHTS).is_file() and (folder / _MEDUSA_PICKLE).is_file():
        raise refuse_pickle(folder / _MEDUSA_PICKLE)
    path = _existing(folder / _MEDUSA_WEIGHTS)
    settings = read_json_object(_existing(folder / _MEDUSA))
    listed = _count(folder / _MEDUSA, settings, "medusa_num_heads", 1)
    # Published checkpoints hold more heads than their config says.
    held = [name.split(".")[0] for name in (_PREFIX.sub("", name, count=1) for name in SafetensorsFile(path).shapes())]
    # A longer number leads nowhere: its tensor has no place then.
    num_heads = max([listed, *(int(head) + 1 for head in held if _HEAD.fullmatch(head))])
    num_layers = _count(folder / _MEDUSA, settings, "medusa_num_layers", 0)
    base = settings.get("base_model_name_or_path")
    return HeadsDescription(num_heads, num_layers, config.model_dim, config.vocab_size, base=base), path


def _read_own(path: Path) -> HeadsDescription:
    settings = read_settings(path, HeadsDescription)
    bounds = {"num_heads": (1, _MOST), "num_layers": (0, _MOST), "model_dim": (1, _WIDEST), "vocab_size": (1, _WIDEST)}
    counts = {key: _count(path, settings, key, *bound) for key, bound in bounds.items()}
    for key in ("conditioned", "share_lm_head"):
        if type(settings.get(key, False)) is not bool:
            raise InvalidCheckpoint(f"{path}: {key} must be true or false, not {settings[key]!r}")
    ids = settings.get("draft_ids")
    if ids is not None:
        is_list = isinstance(ids, list) and len(ids) > 0
        if not is_list or not all(type(one) is int and 0 <= one < counts["vocab_size"] for one in ids):
            raise InvalidCheckpoint(f"{path}: draft_ids must list ids below vocab_size {counts['vocab_size']}")
        if len(set(ids)) < len(ids):
            raise InvalidCheckpoint(f"{path}: draft_ids lists {len(ids) - len(set(ids))} ids more than once")
        ids = tuple(ids)
    return HeadsDescription(**{**settings, **counts, "draft_ids": ids})


def _count(path: Path, settings: Mapping[str, Any], key: str, least: int, most: int = _MOST) -> int:
    value = settings.get(key)
    if type(value) is not int or not least <= value <= most:
        raise InvalidCheckpoint(f"{path}: {key} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointNotFound(
            f"{path}: no such file; heads are {_OWN_WEIGHTS} or {_MEDUSA_WEIGHTS} with a JSON file"
        )
    return path


def _check_model(folder: Path, description: HeadsDescription, config: DecoderConfig) -> None:
    of = f" of {description.base}" if description.base else ""
    if description.model_dim != config.model_dim:
        raise InvalidCheckpoint(
            f"{folder}: heads{of} read {description.model_dim} hidden channels, but the model has {config.model_dim}"
        )
    if description.vocab_size != config.vocab_size:
        raise InvalidCheckpoint(
            f"{folder}: heads{of} know {description.vocab_size} tokens, but the model's vocabulary has "
            f"{config.vocab_size}"
        )


def _check_names(path: Path, description: HeadsDescription, shapes: Mapping[str, tuple[int, ...]]) -> None:
    needed = [
        f"{head}.{layer}.linear.{part}"
        for head in range(description.num_heads)
        for layer in range(description.num_layers)
        for part in ("weight", "bias")
    ]
    outputs = [f"{head}.{description.num_layers}.weight" for head in range(description.num_heads)]
    if not description.share_lm_head:
        needed += outputs
    optional = {name.replace(".linear.", ".out.") for name in needed if name.endswith(".linear.weight")}
    what = f"{description.num_heads} heads of {description.num_layers} layers"
    if missing := [name for name in needed if name not in shapes]:
        raise InvalidCheckpoint(f"{path}: {what} need tensor {missing[0]}, which is missing")
    if extra := sorted(shapes.keys() - set(needed) - optional):
        raise InvalidCheckpoint(f"{path}: {what} leave no place for tensor {extra[0]}")


def _read_head(description: HeadsDescription, index: int, read: Any, shapes: Mapping[str, Any]) -> Params:
    width = description.model_dim
    blocks = []
    for layer in range(description.num_layers):
        prefix = f"{index}.{layer}"
        has_out = f"{prefix}.out.weight" in shapes
        inner = shapes[f"{prefix}.linear.bias"][0] if has_out else width
        inputs = width * (index + 2) if description.conditioned and layer == 0 else width
        block = {
            "kernel": read(f"{prefix}.linear.weight", (inner, inputs)),
            "bias": read(f"{prefix}.linear.bias", (inner,)),
        }
        blocks.append({**block, "out": read(f"{prefix}.out.weight", (width, inner))} if has_out else block)
    head: Params = {"blocks": tuple(blocks)}
    if not description.share_lm_head:
        rows = len(description.draft_ids) if description.draft_ids is not None else description.vocab_size
        head["output"] = {"kernel": read(f"{index}.{description.num_layers}.weight", (rows, width))}
    return head
