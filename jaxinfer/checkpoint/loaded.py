"""A loaded model as a checkpoint: its parameters, split and padded in any way, as the original tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.leaves import Leaf, list_leaves
from jaxinfer.checkpoint.source import StoredForm, widened
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.padding import first_copies
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.split import take_quantized


class LoadedTensors:
    """A model's parameters under Hugging Face names; one at a time is gathered on the host.

    ``fetch`` returns a whole array. Where processes share the model, `jaxinfer.parallel.partitioner.Partitioner.fetch`
    does, and all of them must read the same tensors in the same order.
    """

    def __init__(
        self,
        params: Params,
        names: TensorNames,
        padding: Mapping[str, Any] | None,
        fetch: Callable[[Any], Any] = np.asarray,
    ):
        self._fetch = fetch
        self._parts: dict[str, list[tuple[Leaf, int, int]]] = {}
        for leaf in list_leaves(params, names, padding):
            for layer, parts in enumerate(leaf.sources):
                for place, source in enumerate(parts):
                    self._parts.setdefault(source.tensor, []).append((leaf, layer, place))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: self._shape(name) for name in self._parts}

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return a tensor's dtype in the model; None for a tensor in few bits."""
        param = self._parts[name][0][0].struct
        return None if is_quantized(param) else np.dtype(param.dtype)

    def forms(self) -> dict[str, StoredForm]:
        """Return the form of every tensor in few bits."""
        return {
            name: StoredForm(leaf.struct.form, leaf.sources[layer][place].transposed)
            for name, ((leaf, layer, place), *_) in self._parts.items()
            if is_quantized(leaf.struct)
        }

    def quantized(self, name: str) -> QuantizedArray:
        """Gather one tensor in few bits, the rows of several matrices one after another."""
        form, pieces = self.forms()[name].form, self._parts[name]
        leaf, layer, place = pieces[0]
        source = leaf.sources[layer][place]
        num_rows = math.prod(source.shape[:-1]) if source.shape else source.total or leaf.num_rows
        result = QuantizedArray.of(
            form, [np.empty(shape, dtype) for shape, dtype in form.parts(num_rows, leaf.shape[-1]).values()]
        )
        for leaf, layer, place in pieces:
            source, count = leaf.sources[layer][place], leaf.num_rows
            kept = slice(place * count, (place + 1) * count)
            one = jax.tree.map(lambda part: self._fetch(part[layer] if leaf.stacked else part), leaf.struct).by_rows()  # noqa: B023
            places = [None if each is None else first_copies(each) for each in leaf.padding[leaf.stacked :]]
            if leaf.is_matrix_each:
                one, places, kept = jax.tree.map(lambda part: part[place], one), places[1:], slice(None)  # noqa: B023
            rows = [part.reshape(-1, part.shape[-1]) for part in take_quantized(one, places).matrix]
            for part_name, whole, part in zip(form.part_names, result.matrix, rows, strict=True):
                if part_name == "order":  # one for all rows
                    whole[...] = part
                else:
                    whole[source.rows(count)] = part[kept]
        return result

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Gather one tensor as ``dtype``."""
        if is_quantized(self._parts[name][0][0].struct):
            return widened(self, name, dtype)
        result = np.empty(self._shape(name), dtype)
        for leaf, layer, place in self._parts[name]:
            source, count = leaf.sources[layer][place], leaf.num_rows
            if source.every:
                values = self._unpadded(leaf, layer)
                source.of_experts(result, values.shape)[...] = values
                continue
            if source.across:
                heads, outputs, inputs = leaf.shape
                turned = self._unpadded(leaf, layer).swapaxes(1, 2).reshape(-1, outputs)
                result[source.rows(heads * inputs)] = turned
                continue
            rows = result if source.shape is None else result.reshape(-1, *leaf.rows_shape[1:])
            rows = rows.T if source.transposed else rows
            if leaf.is_matrix_each:
                rows[source.rows(count)] = self._unpadded(leaf, layer, place)
            else:
                kept = self._unpadded(leaf, layer).reshape(leaf.rows_shape)
                rows[source.rows(count)] = kept[place * count : (place + 1) * count]
        return result

    def _shape(self, name: str) -> tuple[int, ...]:
        leaf, layer, place = self._parts[name][0]
        return leaf.tensor_shape(leaf.sources[layer][place])

    def _unpadded(self, leaf: Leaf, layer: int, place: int | None = None) -> np.ndarray:
        """Return a parameter in one layer without padding, a kernel as ``[out, in]``; or one matrix of a stack."""
        values, padding = leaf.struct[layer] if leaf.stacked else leaf.struct, leaf.padding[leaf.stacked :]
        values, padding = (values, padding) if place is None else (values[place], padding[1:])
        values = self._fetch(values)
        for axis, source in enumerate(padding):
            if source is not None:
                values = np.take(values, first_copies(source), axis=axis)
        return values.T if leaf.transposed else values
