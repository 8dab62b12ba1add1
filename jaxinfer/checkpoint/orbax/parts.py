"""Tensors in few bits as the tensors of their parts: how a converted folder stores them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxinfer.checkpoint.orbax.layout import StoredTensor
from jaxinfer.checkpoint.source import QuantizedSource, StoredForm, TensorSource
from jaxinfer.ops.few_bits.formats import format_from
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


def factor_tensor(name: str) -> str:
    """Return the tensor that holds factors of this name (`jaxinfer.models.folded`)."""
    return f"folded.{name}"


@dataclass(frozen=True)
class FewBitsTensor:
    """A tensor in few bits: the shape that it has as plain numbers, and its form."""

    shape: tuple[int, ...]
    stored: StoredForm

    @property
    def rows_and_width(self) -> tuple[int, int]:
        """The shape of the matrix whose rows are outputs, those of a stack of matrices one after another."""
        *rows, width = self.shape[::-1] if self.stored.is_transposed else self.shape
        return math.prod(rows), width

    def parts(self, name: str) -> dict[str, tuple[tuple[int, int], str]]:
        """Return the shape and the dtype of each part, by the name of the part's tensor."""
        return {f"{name}.{part}": found for part, found in self.stored.form.parts(*self.rows_and_width).items()}


def describe_form(tensor: FewBitsTensor) -> dict[str, Any]:
    """Return what a marker says of a tensor in few bits."""
    form = {"form": asdict(tensor.stored.form), "is_transposed": tensor.stored.is_transposed}
    return {"shape": list(tensor.shape), **form}


def read_form(
    name: str, tensors: Mapping[str, StoredTensor], shape: list[int], form: Mapping[str, Any], is_transposed: bool
) -> FewBitsTensor:
    """Return what `describe_form` described; raise ValueError unless its parts are among the tensors."""
    if len(shape) not in (2, 3 - bool(is_transposed)) or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(shape)
    found = FewBitsTensor(tuple(shape), StoredForm(format_from(form), bool(is_transposed)))
    if found.rows_and_width[1] % found.stored.form.unit:
        raise ValueError(shape)
    for part, (expected, dtype) in found.parts(name).items():
        if part not in tensors or (tensors[part].shape, tensors[part].dtype) != (expected, dtype):
            raise ValueError(part)
    return found


class TensorParts:
    """A source as the writer sees it: the tensors in ``forms`` are those of their parts, one after the other.

    ``factors`` are tensors beside them (`factor_tensor`).
    """

    def __init__(self, source: TensorSource, forms: Mapping[str, StoredForm], factors: Mapping[str, np.ndarray]):
        self._source = source
        self._factors = {factor_tensor(name): np.asarray(factors[name], np.float32) for name in factors}
        shapes = source.shapes()
        self.forms = {name: FewBitsTensor(tuple(shapes[name]), stored) for name, stored in forms.items()}
        self._whole = {part: name for name, tensor in self.forms.items() for part in tensor.parts(name)}
        self._last: tuple[str, QuantizedArray] | None = None

    def dtypes(self) -> dict[str, np.dtype]:
        """Return the dtype of every part and factor."""
        of_parts = {part: np.dtype(dtype) for part, (_, dtype) in self._parts().items()}
        return of_parts | {name: factor.dtype for name, factor in self._factors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor and part."""
        of_parts = {part: shape for part, (shape, _) in self._parts().items()}
        return {**self._source.shapes(), **of_parts, **{name: each.shape for name, each in self._factors.items()}}

    def _parts(self) -> dict[str, tuple[tuple[int, int], str]]:
        return {part: found for name, tensor in self.forms.items() for part, found in tensor.parts(name).items()}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read a tensor as ``dtype``, or a part of one in its own."""
        if name in self._factors:
            return self._factors[name]
        if name not in self._whole:
            return self._source.read(name, dtype)
        whole = self._whole[name]
        if self._last is None or self._last[0] != whole:
            assert isinstance(self._source, QuantizedSource)
            self._last = whole, self._source.quantized(whole)
        return np.asarray(getattr(self._last[1], name.rpartition(".")[2]))
