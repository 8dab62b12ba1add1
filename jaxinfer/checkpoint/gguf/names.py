"""Finds the Hugging Face name of each GGUF tensor, and the steps that undo llama.cpp's conversion."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.header import TensorEntry, quote
from jaxinfer.checkpoint.rotary_rows import grouped_places, half_split_places
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
_SCALE = re.compile(r"(blk\.(?:0|[1-9]\d{0,5})\.(\w+))\.scale")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file: ``num_heads`` is set if its rows are interleaved within each head.

    ``groups`` is set if they are the rows of all queries, of all keys and of all values, and Hugging Face's go group by
    group: the number of query heads and of key/value heads. ``shift`` was added to its values, and ``scale`` multiplies
    them. If ``transposed``, Hugging Face's shape is the reverse of the file's.
    """

    entry: TensorEntry
    num_heads: int | None = None
    groups: tuple[int, int] | None = None
    shift: float = 0.0
    scale: float = 1.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return Hugging Face's shape of the tensor."""
        return self.entry.shape[::-1] if self.transposed else self.entry.shape

    @property
    def is_changed(self) -> bool:
        """Tell whether values are others than Hugging Face's."""
        return self.shift != 0.0 or self.scale != 1.0

    @property
    def is_reordered(self) -> bool:
        """Tell whether rows stand in another order than Hugging Face's."""
        return self.num_heads is not None or self.groups is not None

    def places(self, num_rows: int) -> np.ndarray | None:
        """Return, for each row in the file, its row in Hugging Face's order; None: the same."""
        if self.groups is not None:
            return grouped_places(num_rows, *self.groups)
        return None if self.num_heads is None else half_split_places(num_rows, self.num_heads)


def place_tensors(
    origin: str, entries: Mapping[str, TensorEntry], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the file's tensors by their Hugging Face names; raises UnsupportedModel for an unknown tensor."""
    placed: dict[str, StoredTensor] = {}
    scales: dict[str, float] = {}
    for name, entry in entries.items():
        match = _SCALE.fullmatch(name)
        if match is not None and match[2] in architecture.scaled:
            scales[f"{match[1]}.weight"] = _number(origin, name, entry)
    for name in scales.keys() - entries.keys():
        raise InvalidCheckpoint(f"{origin}: tensor {quote(name)} is missing beside its scale; convert the model again")
    for name, entry in entries.items():
        is_scale = name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in scales
        if is_scale or name in architecture.rope_divisors:
            continue
        for hf_name, stored in _place(origin, name, entry, architecture, config):
            if hf_name in placed:
                raise InvalidCheckpoint(f"{origin}: tensor {quote(name)} repeats another; convert the model again")
            placed[hf_name] = replace(stored, scale=scales.get(name, 1.0))
    return placed


def made_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Return float32 tensors that stand among the metadata as those of a file, under the same names."""
    kind = GGMLQuantizationType.F32
    return {
        name: StoredTensor(TensorEntry(kind, one.shape, 0, one.nbytes, one.tobytes())) for name, one in arrays.items()
    }


def _place(
    origin: str, name: str, entry: TensorEntry, architecture: Architecture, config: Mapping[str, Any]
) -> Iterator[tuple[str, StoredTensor]]:
    shift = architecture.norm_shift if name.endswith("norm.weight") else 0.0
    if name in architecture.top:
        yield architecture.top[name], StoredTensor(entry, shift=shift)
        return
    match = _BLOCK.fullmatch(name)
    layer, part, kind = match.groups() if match else ("", "", "")
    if part in architecture.fused:
        keys = [key for _, key in architecture.fused[part]]
        for (inner, _), rows in zip(architecture.fused[part], _split(origin, name, entry, keys, config)):
            yield f"{architecture.layers}.{layer}.{inner}.{kind}", StoredTensor(rows)
        return
    block = architecture.block
    if architecture.block_of is not None:
        block = {**block, **architecture.block_of(config)}
    if part not in block:
        raise UnsupportedModel(
            f"{origin}: tensor {quote(name)} has no place in the decoder; "
            f"use a conversion of a plain {architecture.name} model"
        )
    heads_key = architecture.interleaved.get(part)
    if heads_key is not None:
        _check_rows(origin, name, entry, [heads_key], config)
    groups = architecture.grouped.get(part)
    if groups is not None:
        _check_rows(origin, name, entry, [groups[0], groups[1], groups[1]], config)
    inner = block[part] if block[part].endswith("_bias") else f"{block[part]}.{kind}"
    yield (
        f"{architecture.layers}.{layer}.{inner}",
        StoredTensor(
            entry,
            num_heads=config[heads_key] if heads_key else None,
            groups=(config[groups[0]], config[groups[1]]) if groups else None,
            shift=shift,
            transposed=part in architecture.transposed and len(entry.shape) == 2,
        ),
    )


def _number(origin: str, name: str, entry: TensorEntry) -> float:
    """Return the number that a tensor is."""
    is_one = entry.kind == GGMLQuantizationType.F32 and math.prod(entry.shape) == 1
    found = float(np.frombuffer(entry.data, np.float32, 1, entry.offset)[0]) if is_one else math.nan
    if not math.isfinite(found):
        raise InvalidCheckpoint(f"{origin}: tensor {quote(name)} must be one number as F32; convert the model again")
    return found


def _check_rows(
    origin: str, name: str, entry: TensorEntry, heads_keys: list[str], config: Mapping[str, Any]
) -> list[int]:
    """Return the number of rows for each key's heads; check that the tensor has the sum of them."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_heads = [config[key] for key in heads_keys]
    if len(entry.shape) > 2 or entry.shape[:1] != (sum(num_heads) * head_dim,):
        raise InvalidCheckpoint(
            f"{origin}: tensor {quote(name)} has shape {list(entry.shape)}, "
            f"not {sum(num_heads)} heads of {head_dim} rows; convert the model again"
        )
    return [number * head_dim for number in num_heads]


def _split(
    origin: str, name: str, entry: TensorEntry, heads_keys: list[str], config: Mapping[str, Any]
) -> Iterator[TensorEntry]:
    counts = _check_rows(origin, name, entry, heads_keys, config)
    if math.prod(entry.shape[1:]) % GGML_QUANT_SIZES[entry.kind][0]:
        raise UnsupportedModel(
            f"{origin}: tensor {quote(name)} is stored as {entry.kind.name}, whose blocks cross its rows; "
            "use a file that stores it as F32"
        )
    row_bytes, offset = entry.num_bytes // entry.shape[0], entry.offset
    for count in counts:
        yield replace(entry, shape=(count, *entry.shape[1:]), offset=offset, num_bytes=count * row_bytes)
        offset += count * row_bytes
