"""A loaded model as a checkpoint: its parameters, split and padded in any way, as the original tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.leaves import Leaf, list_leaves
from jaxinfer.models.families.family import TensorNames
from jaxinfer.notation import Params


class LoadedTensors:
    """A model's parameters under Hugging Face names; one at a time is gathered on the host."""

    def __init__(self, params: Params, names: TensorNames, padding: Mapping[str, Any] | None):
        self._parts: dict[str, list[tuple[Leaf, int]]] = {}
        for leaf in list_leaves(params, names, padding):
            for layer, source in enumerate(leaf.sources):
                self._parts.setdefault(source.tensor, []).append((leaf, layer))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: leaf.tensor_shape(leaf.sources[layer]) for name, ((leaf, layer), *_) in self._parts.items()}

    def stored_dtype(self, name: str) -> np.dtype:
        """Return a tensor's dtype in the model."""
        return np.dtype(self._parts[name][0][0].struct.dtype)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Gather one tensor as ``dtype``."""
        leaf, layer = self._parts[name][0]
        result = np.empty(leaf.tensor_shape(leaf.sources[layer]), dtype)
        for leaf, layer in self._parts[name]:
            source = leaf.sources[layer]
            rows = result.T if source.transposed else result
            rows[source.rows(leaf.shape[0])] = _unpadded(leaf, layer)
        return result


def _unpadded(leaf: Leaf, layer: int) -> np.ndarray:
    """Return a parameter in one layer without padding, a kernel as ``[out, in]``."""
    values = np.asarray(leaf.struct[layer] if leaf.stacked else leaf.struct)
    for axis, source in enumerate(leaf.padding[leaf.stacked :]):
        if source is not None:
            # Of an element that padding copied, take the first copy.
            kept = np.flatnonzero(source >= 0)
            _, first = np.unique(source[kept], return_index=True)
            values = np.take(values, kept[first], axis=axis)
    return values.T if leaf.transposed else values
