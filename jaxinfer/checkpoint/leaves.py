"""Maps each of a decoder's parameters to its tensors in a checkpoint."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np

from jaxinfer.models.families.family import Part, Source, TensorNames
from jaxinfer.models.layers import TRANSPOSED_KERNEL, locate
from jaxinfer.models.padding import Sources


@dataclass(frozen=True)
class Leaf:
    """One parameter: its path in the tree, and its tensors in the checkpoint, for each layer if stacked.

    ``struct`` is the parameter or its shape. ``padding`` gives the source of each element if the parameter is padded.
    """

    path: tuple[str, ...]
    struct: Any
    sources: tuple[tuple[Part, ...], ...]
    stacked: bool
    transposed: bool
    padding: Sources

    @property
    def num_bytes(self) -> int:
        return self.struct.size * np.dtype(self.struct.dtype).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape in one layer, without padding; a kernel's is ``[out, in]``."""
        sizes = zip(self.struct.shape, self.padding, strict=True)
        shape = tuple(size if source is None else int(source.max()) + 1 for size, source in sizes)[self.stacked :]
        return shape[::-1] if self.transposed else shape

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape with all rows on one axis: those of a stack of matrices are one after another."""
        *rows, width = self.shape
        return (math.prod(rows), width) if rows else self.shape

    @property
    def num_rows(self) -> int:
        """The number of rows that each of a layer's tensors has."""
        return self.rows_shape[0] // len(self.sources[0])

    @property
    def is_matrix_each(self) -> bool:
        """Whether each of a layer's tensors is one matrix of a stack."""
        return len(self.shape) > 2 and len(self.sources[0]) == self.shape[0]

    def tensor_shape(self, source: Part) -> tuple[int, ...]:
        """The required shape of the checkpoint's tensor."""
        if source.shape is not None:
            return source.shape
        shape = (source.total or self.num_rows, *self.rows_shape[1:])
        return shape[::-1] if source.transposed else shape


def list_leaves(abstract: Mapping[str, Any], names: TensorNames, padding: Mapping[str, Any] | None) -> Iterator[Leaf]:
    """Yield every parameter of a tree of parameters or shapes; ``padding`` is a tree of `Sources`."""
    for path, struct in _walk(abstract, ()):
        layers, stacked, name, transposed = locate(path, struct.shape)
        sources = (None,) * len(struct.shape) if padding is None else _sources_of(path, padding)
        if layers is None:
            parts = (_parts(names.top[name]),)
        else:
            found = _parts(names.block[name])
            parts = tuple(
                tuple(replace(source, tensor=source.tensor.format(layer=layer)) for source in found) for layer in layers
            )
        yield Leaf(path, struct, parts, stacked, transposed, sources)


def _sources_of(path: tuple[str, ...], padding: Mapping[str, Any]) -> Sources:
    node = reduce(getitem, path[:-1], padding)
    # A quantized kernel is ``[out, in]`` where others are not.
    return node[path[-1]] if path[-1] in node else node[TRANSPOSED_KERNEL][::-1]


def _parts(source: Source) -> tuple[Part, ...]:
    if isinstance(source, tuple):
        return tuple(map(Part, source))
    return (Part(source) if isinstance(source, str) else source,)


def _walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        else:
            yield (*path, key), value
