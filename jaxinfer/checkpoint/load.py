"""Reads a checkpoint's tensors, one at a time, into the decoder's parameters."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.families.family import Part, Source, TensorNames
from jaxinfer.models.layers import locate
from jaxinfer.notation import Params

Progress = Callable[[int, int], None]
_ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class _Leaf:
    """One parameter: where it goes, and where it comes from (one place a layer where stacked)."""

    path: tuple[str, ...]
    struct: jax.ShapeDtypeStruct
    sources: tuple[Part, ...]
    stacked: bool
    transposed: bool

    @property
    def num_bytes(self) -> int:
        return self.struct.size * np.dtype(self.struct.dtype).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape in one layer, a kernel's as ``[out, in]``."""
        shape = tuple(self.struct.shape[1:] if self.stacked else self.struct.shape)
        return shape[::-1] if self.transposed else shape

    def tensor_shape(self, source: Part) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = (source.total or self.shape[0], *self.shape[1:])
        return shape[::-1] if source.transposed else shape


def load_params(
    checkpoint: Checkpoint, names: TensorNames, abstract: Mapping[str, Any], progress: Progress | None = None
) -> Params:
    """Read the parameters that ``abstract`` describes, in its dtypes.

    ``abstract`` is a nested dictionary of ``jax.ShapeDtypeStruct`` as `jaxinfer.models.decoder.abstract_params` gives
    it, its blocks stacked or not. Where a struct names a sharding, the array is placed by it. ``progress`` receives
    the bytes done and the bytes in total, of the parameters. Raises :class:`InvalidCheckpoint` for a missing, extra or
    misshapen tensor before any weight is read.
    """
    names = names.spelled_in(checkpoint.tensors.shapes())
    leaves = list(_leaves(abstract, names))
    _check(checkpoint, leaves, names)
    # Largest first: the transient copy of a large leaf then meets an almost empty memory.
    leaves.sort(key=lambda leaf: leaf.num_bytes, reverse=True)
    total, done = sum(leaf.num_bytes for leaf in leaves), 0
    params: Params = {}
    for leaf in leaves:
        node = params
        for part in leaf.path[:-1]:
            node = node.setdefault(part, {})
        node[leaf.path[-1]] = _read(checkpoint, leaf)
        done += leaf.num_bytes
        if progress is not None:
            progress(done, total)
    return params


def check_tensors(checkpoint: Checkpoint, names: TensorNames, abstract: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidCheckpoint` for a missing, extra or misshapen tensor; reads no weights."""
    names = names.spelled_in(checkpoint.tensors.shapes())
    _check(checkpoint, list(_leaves(abstract, names)), names)


def _leaves(abstract: Mapping[str, Any], names: TensorNames) -> Iterator[_Leaf]:
    for path, struct in _walk(abstract, ()):
        layers, stacked, name, transposed = locate(path, struct.shape)
        if layers is None:
            yield _Leaf(path, struct, (_part(names.top[name]),), stacked, transposed)
        else:
            source = _part(names.block[name])
            parts = tuple(replace(source, tensor=source.tensor.format(layer=layer)) for layer in layers)
            yield _Leaf(path, struct, parts, stacked, transposed)


def _part(source: Source) -> Part:
    return Part(source) if isinstance(source, str) else source


def _walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], jax.ShapeDtypeStruct]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        else:
            yield (*path, key), value


def _check(checkpoint: Checkpoint, leaves: list[_Leaf], names: TensorNames) -> None:
    expected = {source.tensor: leaf.tensor_shape(source) for leaf in leaves for source in leaf.sources}
    found = checkpoint.tensors.shapes()
    if missing := [name for name in expected if name not in found]:
        raise InvalidCheckpoint(f"{checkpoint.origin}: missing {_listed(missing)}; fetch all files of the model")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored) or r"(?!)")
    if extra := sorted(name for name in found if name not in expected and not ignored.fullmatch(name)):
        raise InvalidCheckpoint(f"{checkpoint.origin}: its configuration leaves no place for {_listed(extra)}")
    wrong = [name for name, shape in expected.items() if tuple(found[name]) != shape]
    if wrong:
        name = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InvalidCheckpoint(
            f"{checkpoint.origin}: tensor {name} has shape {list(found[name])}, "
            f"but its configuration makes it {list(expected[name])}{others}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _read(checkpoint: Checkpoint, leaf: _Leaf) -> jax.Array:
    dtype = np.dtype(leaf.struct.dtype)
    buffer = _aligned_empty(tuple(leaf.struct.shape), dtype)
    # Filled by assignment: a JAX array may alias its buffer, which so is never a file that can be cut or rewritten.
    for place, source in zip(buffer if leaf.stacked else (buffer,), leaf.sources, strict=True):
        tensor = checkpoint.tensors.read(source.tensor, dtype)
        rows = (tensor.T if source.transposed else tensor)[source.first : source.first + leaf.shape[0]]
        place[...] = rows.T if leaf.transposed else rows
    return jax.block_until_ready(jax.device_put(buffer, leaf.struct.sharding))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate memory that JAX's CPU backend can take over without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
