"""A matrix of weights in few bits, as one pytree: codes, scales and, where its form has them, minima."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Int
from jaxinfer.ops.few_bits.formats import FP8, LEAST_POWER_BITS, RUN, Format
from jaxinfer.ops.few_bits.sparse import spread
from jaxinfer.ops.rounding import rounded


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "minima", "scale_units", "minima_units", "zeros", "order", "places"),
    meta_fields=("form",),
)
@dataclass(frozen=True)
class QuantizedArray:
    """Weights ``[..., N, K]``: codes ``[..., N, B]``, and scales and minima ``[..., N, G]`` of G groups a row.

    Units of scales and of minima are ``[..., N, U]`` for U super-blocks of groups; zeros are ``[..., N, G]``. Column j
    of the codes is that of input ``order[..., 0, j]``. Of a sparse form the codes are the weights that are stored, in
    bfloat16, and ``places`` says where they are (`Format.kept`). What the form does not have is None.
    All else follows from the arrays: slices and stacks of them are quantized arrays too.
    """

    codes: Any
    scales: Any
    minima: Any
    form: Format
    scale_units: Any = None
    minima_units: Any = None
    zeros: Any = None
    order: Any = None
    places: Any = None

    @staticmethod
    def of(form: Format, parts: Sequence[Any]) -> "QuantizedArray":
        """Return the array that has these parts, in the form's order."""
        return QuantizedArray(
            form=form, **{"scales": None, "minima": None, **dict(zip(form.part_names, parts, strict=True))}
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return (*self.codes.shape[:-1], self.form.width_of(self.codes.shape[-1] * self.codes.dtype.itemsize))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim

    @property
    def matrix(self) -> tuple[Any, ...]:
        """The arrays that a product reads, in the form's order."""
        return tuple(getattr(self, name) for name in self.form.part_names)

    def in_order(self) -> "QuantizedArray":
        """Return the array whose inputs are those of this one, taken in `order`."""
        return replace(self, order=None, form=replace(self.form, is_ordered=False))

    def with_parts(self, parts: Sequence[Any]) -> "QuantizedArray":
        """Return the array that has other parts."""
        return QuantizedArray.of(self.form, parts)

    def specs(self, spec: PartitionSpec) -> list[PartitionSpec]:
        """Return how each part is split if the weights ``[..., N, K]`` are; a row's one scale is where any of it is."""
        *lead, inputs = spec
        if self.form.kept is not None:
            return [spec] * len(self.form.part_names)
        by_row = PartitionSpec(*lead, None if self.form.group is None else inputs)
        return [spec if name == "codes" else by_row for name in self.form.part_names]

    def by_rows(self) -> "QuantizedArray":
        """Return the array as it is stored, which it is."""
        return self

    def rows(self, ids: Int[Array, "*shape"]) -> "QuantizedArray":
        """Return the rows of a matrix with these numbers."""
        return self.map_rows(lambda part: take(part, ids))

    def map_rows(self, change: Callable[[Any], Any]) -> "QuantizedArray":
        """Return the array after a change of the rows of each part; the order of inputs is one for all rows."""
        parts = zip(self.form.part_names, self.matrix)
        return QuantizedArray.of(self.form, [part if name == "order" else change(part) for name, part in parts])

    def dequantize(self) -> Any:
        """Return the weights in float32; of NumPy's arrays, an array of NumPy's."""
        if self.form.kept is not None:
            return spread(self.codes, self.places, self.form)
        form, on_host = self.form, isinstance(self.codes, np.ndarray)
        numpy: Any = np if on_host else jnp
        codes = self.codes if form.bits == 8 else self.unpacked()
        if form.levels == FP8.levels and not on_host:
            levels = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        elif form.offset is None:
            levels = numpy.asarray(form.levels, np.float32)[codes.astype(np.int32) & 255]
        else:
            levels = codes.astype(np.float32) - np.float32(form.offset)
        scales, minima = self.float_scales(), _in_units(self.minima, self.minima_units)
        levels = levels.reshape(*scales.shape, -1)
        if self.zeros is not None:
            levels = levels - self.zeros.astype(np.float32)[..., None]
        weights = levels * scales[..., None]
        if minima is not None:
            weights = (weights if on_host else rounded(weights)) + minima[..., None]
        weights = weights.reshape(self.shape)
        if self.order is None:
            return weights
        return numpy.take_along_axis(weights, numpy.argsort(self.order, axis=-1), axis=-1)

    def float_scales(self) -> Any:
        """Return the scales in float32, whatever they are stored as; of a sparse form, the weights."""
        if self.form.kept is not None:
            return self.codes.astype(np.float32)
        return _in_units(self.scales, self.scale_units)

    def unpacked(self) -> Any:
        """Return codes of less than 8 bits, one a byte."""
        numpy: Any = np if isinstance(self.codes, np.ndarray) else jnp
        bits = self.form.bits
        runs = self.codes.reshape(*self.codes.shape[:-1], -1, self.form.row_bytes(RUN))
        packed, high = runs[..., : RUN // 2], runs[..., RUN // 2 :]
        codes = numpy.concatenate([packed & 15, packed >> 4], axis=-1)
        if bits == 5:
            fifth = (high[..., :, None] >> np.arange(8, dtype=np.uint8)) & 1
            codes = codes | fifth.reshape(codes.shape) << 4
        elif bits == 6:
            others = (high[..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
            codes = codes | others.reshape(codes.shape) << 4
        return codes.reshape(self.shape)


def _in_units(part: Any, units: Any) -> Any:
    """Return scales or minima in float32: exactly, for units have 11 bits and their multiples 8."""
    if part is not None and part.dtype == np.uint8:
        return powers_of(part)
    if part is None or units is None:
        return None if part is None else part.astype(np.float32)
    split = part.astype(np.float32).reshape(*units.shape, -1) * units.astype(np.float32)[..., None]
    return split.reshape(part.shape)


def powers_of(exponents: Any) -> Any:
    """Return the powers of two that bytes stand for (`Format`), in float32; of NumPy's bytes, an array of NumPy's."""
    if isinstance(exponents, np.ndarray):
        bits = np.where(exponents == 0, np.uint32(LEAST_POWER_BITS), exponents.astype(np.uint32) << 23)
        return bits.view(np.float32)
    bits = jnp.where(exponents == 0, jnp.uint32(LEAST_POWER_BITS), exponents.astype(jnp.uint32) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree of parameters is a quantized array."""
    return isinstance(node, QuantizedArray)


def take(part: Any, place: Any) -> Any:
    """Return ``part[place]``; XLA's CPU backend would convert all of an array of float16 first."""
    if part.dtype != np.float16 or isinstance(part, np.ndarray):
        return part[place]
    bits = jax.lax.bitcast_convert_type(part, jnp.uint16)[place]
    return jax.lax.bitcast_convert_type(bits, jnp.float16)
