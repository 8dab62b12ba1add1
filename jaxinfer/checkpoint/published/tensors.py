"""The tensors of a published checkpoint under the names that they have without quantization."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import FLOATS, Layer, Stored
from jaxinfer.checkpoint.source import DescribedSource, StoredForm
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

_WEIGHT, _BIAS = ".weight", ".bias"


class PublishedTensors:
    """Plain tensors as they are, and matrices in few bits, which can be read as plain numbers too."""

    def __init__(self, origin: str, source: DescribedSource, scheme: Scheme):
        self.scheme = scheme
        self._source = source
        stored = Stored(origin, source)
        self._layers: Mapping[str, Layer] = scheme.layers(stored)
        hidden = {part for layer in self._layers.values() for part in layer.parts}
        self._plain = {
            name: shape
            for name, shape in stored.shapes.items()
            if name not in hidden and not name.endswith(scheme.dropped or ("\0",))
        }
        self._stored = stored
        for name in self._plain:
            if name in self._layers:
                raise self._unknown(name)
        if not self._layers:
            for name in self._plain:  # parts of a matrix that is not whole say more than that there is none
                self._plain_dtype(name)
            raise InvalidCheckpoint(f"{origin}: holds no weights of {scheme.name}; fetch all files of the model")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return {**self._plain, **{name: layer.shape for name, layer in self._layers.items()}}

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype in which a tensor is stored, for a matrix in few bits one that holds it, or None."""
        if name not in self._layers:
            return self._plain_dtype(name)
        holds = self._layers[name].holds
        return None if holds is None else np.dtype(holds)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as plain numbers."""
        if name in self._layers:
            return self._layers[name].read().dense().astype(dtype, copy=False)
        self._plain_dtype(name)
        return self._source.read(name, dtype)

    def _plain_dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor that is read as it is; those that a family leaves out may have any."""
        dtype = self._source.stored_dtype(name)
        if dtype is None or dtype.name not in FLOATS:
            raise self._unknown(name)
        return dtype

    def _unknown(self, name: str) -> InvalidCheckpoint:
        dtype = self._source.stored_dtype(name)
        return self._stored.wrong(name, f"has type {dtype}, but nothing says what its numbers stand for")

    def forms(self) -> Mapping[str, StoredForm | None]:
        """Return the form of every matrix in few bits, None if it lies in none; reads scales, but no codes."""
        return self._forms

    @cached_property
    def _forms(self) -> dict[str, StoredForm | None]:
        found = {name: layer.read().form for name, layer in self._layers.items()}
        return {name: None if form is None else StoredForm(form) for name, form in found.items()}

    def quantized(self, name: str) -> QuantizedArray:
        """Read a matrix in few bits."""
        return self._layers[name].read().quantized()

    def is_spare(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros that belongs to a matrix in few bits.

        The first GPTQ files have one for every matrix, whatever the model.
        """
        is_bias = name.endswith(_BIAS) and name.removesuffix(_BIAS) + _WEIGHT in self._layers
        return is_bias and not self._source.read(name, np.dtype(np.float32)).any()
