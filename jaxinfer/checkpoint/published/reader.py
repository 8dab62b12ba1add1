"""Reads the matrices of a published checkpoint in their own bits, and widens those that have no products."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint.few_bits import FewBitsReader, join_layers, rows_of
from jaxinfer.checkpoint.leaves import Leaf
from jaxinfer.checkpoint.published.tensors import PublishedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

_TABLE = ("embed", "embedding")


class OwnBitsReader(FewBitsReader):
    """Keeps what ``why_not`` does not say a reason against, for a form and its number of inputs; notes the reasons."""

    def __init__(self, why_not: Callable[[Format, int], str | None]):
        super().__init__(None)
        self._why_not = why_not

    def read(self, checkpoint: Checkpoint, leaf: Leaf, read_plainly: Any) -> QuantizedArray | None:
        """Return a kernel or a table in few bits, None for a parameter that is plain, or becomes so."""
        tensors = checkpoint.tensors
        assert isinstance(tensors, PublishedTensors)
        names = [part.tensor for parts in leaf.sources for part in parts]
        if not any(map(tensors.is_coded, names)):
            return None
        forms = tensors.forms()
        reason = self._reason(leaf, [forms[name].form if name in forms else None for name in names])
        if reason is not None:
            self.widened.add(reason)
            return None
        found = [rows_of(tensors.quantized(part.tensor), part.rows(leaf.num_rows)) for (part,) in leaf.sources]
        is_ordered = any(each.form.is_ordered for each in found)
        return join_layers(leaf, [_ordered(each) if is_ordered else each for each in found])

    def _reason(self, leaf: Leaf, forms: list[Format | None]) -> str | None:
        """Return why a parameter of tensors of these forms is widened."""
        if leaf.path[-1] not in (KERNEL, TRANSPOSED_KERNEL) and leaf.path != _TABLE:
            return "what is no matrix of products"
        if None in forms:
            return "groups that are no equal runs of 32 inputs"
        if any(len(parts) > 1 or any(part.transposed for part in parts) for parts in leaf.sources):
            return "parameters of several tensors"
        unordered = {replace(form, is_ordered=False) for form in forms if form is not None}
        if len(unordered) > 1:
            return "layers in several forms"
        reasons = [self._why_not(form, leaf.shape[-1]) for form in forms if form is not None]
        return next((reason for reason in reasons if reason is not None), None)


def _ordered(array: QuantizedArray) -> QuantizedArray:
    """Return an array as one whose inputs are taken in an order."""
    if array.form.is_ordered:
        return array
    order = np.arange(array.shape[-1], dtype=np.int32)[None]
    return replace(array, order=order, form=replace(array.form, is_ordered=True))
