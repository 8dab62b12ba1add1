"""A matrix of weights in few bits, as one pytree: codes, scales and, where its form has them, minima."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.notation import Array, Int
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.rounding import rounded


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scales", "minima"), meta_fields=("form",))
@dataclass(frozen=True)
class QuantizedArray:
    """Weights ``[..., N, K]``: codes ``[..., N, B]``, and scales and minima ``[..., N, G]`` of G groups a row.

    Minima are None where the form has none. All else follows from the arrays: slices and stacks of them are quantized
    arrays too.
    """

    codes: Any
    scales: Any
    minima: Any
    form: Format

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.form.bits)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim

    @property
    def matrix(self) -> tuple[Any, ...]:
        """The arrays that a product reads."""
        return (self.codes, self.scales) if self.minima is None else (self.codes, self.scales, self.minima)

    def rows(self, ids: Int[Array, "*shape"]) -> "QuantizedArray":
        """Return the rows of a matrix with these numbers."""
        codes, *groups = self.matrix
        scales, minima = (*(_taken(part, ids) for part in groups), None)[:2]
        return QuantizedArray(codes[ids], scales, minima, self.form)

    def dequantize(self) -> Any:
        """Return the weights in float32; of NumPy's arrays, an array of NumPy's."""
        codes, form = self.codes, self.form
        on_host = isinstance(codes, np.ndarray)
        numpy: Any = np if on_host else jnp
        if form.bits == 4:
            packed = codes.reshape(*codes.shape[:-1], -1, RUN // 2)
            codes = numpy.concatenate([packed & 15, packed >> 4], axis=-1).reshape(self.shape)
        if form.offset is None:
            levels = numpy.asarray(form.levels, np.float32)[codes.astype(np.int32)]
        else:
            levels = codes.astype(np.float32) - np.float32(form.offset)
        levels = levels.reshape(*self.scales.shape, -1)
        weights = levels * self.scales.astype(np.float32)[..., None]
        if self.minima is not None:
            weights = (weights if on_host else rounded(weights)) + self.minima.astype(np.float32)[..., None]
        return weights.reshape(self.shape)


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree of parameters is a quantized array."""
    return isinstance(node, QuantizedArray)


def _taken(groups: Any, ids: Any) -> Any:
    """Return rows of scales; XLA's CPU backend would convert all of a float16 table first."""
    if groups.dtype != jnp.float16:
        return groups[ids]
    bits = jax.lax.bitcast_convert_type(groups, jnp.uint16)[ids]
    return jax.lax.bitcast_convert_type(bits, jnp.float16)
