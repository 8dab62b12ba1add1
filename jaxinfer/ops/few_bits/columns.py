"""Quantized arrays as TPUs read them: codes ``[in, out]``, of four bits or eight, and float16 as bits of int16.

A TPU's matrix unit takes a kernel's inputs along its rows, packs four bits itself, and knows no float16. Kernels of our
own multiply them; of 4-bit floats that are not experts', whose scales are powers of two, the compiler widens codes in
the product. Codes of 5 and 6 bits take a byte each.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Float, Integer
from jaxinfer.ops.few_bits.formats import FP8, GROUPS, MXFP4, RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, powers_of

# The rows of a kernel ``[in, out]`` that the matrix unit takes at once.
_TILE = 128
# So many inputs are whole tiles of vector memory.
_UNIT = 64
_BYTE = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColumnArray(QuantizedArray):
    """Weights ``[..., N, K]``: codes ``[..., K, N]`` in uint4 or int8, and scales and minima ``[..., G, N]``.

    Codes of 5 and 6 bits are int8, less their offset. What is float16 is int16, and bfloat16 float32. With ``layer``,
    the parts are stacks ``[L, ...]``, of which this is that layer: a kernel reads it where it lies.
    """

    form: Format = dataclasses.field(metadata={"static": True})
    layer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        *lead, width, outputs = self.codes.shape[self.layer is not None :]
        return (*lead, outputs, width)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def with_parts(self, parts: Any) -> "ColumnArray":
        """Return the array that has other parts."""
        return dataclasses.replace(self, **dict(zip(self.form.part_names, parts, strict=True)))

    def specs(self, spec: PartitionSpec) -> list[PartitionSpec]:
        """Return how each part is split if the weights ``[..., N, K]`` are split by ``spec``."""
        *lead, outputs, inputs = spec
        return [PartitionSpec(*lead, inputs, outputs)] * len(self.form.part_names)

    def at(self, layer: Any) -> "ColumnArray":
        """Return one layer of a stack, without slicing it."""
        return dataclasses.replace(self, layer=layer)

    def rows(self, ids: Any) -> QuantizedArray:
        """Return the rows of a matrix with these numbers, as they are stored."""
        taken = [part[:, ids.reshape(-1)] for part in self.matrix]
        return self.with_parts(taken).by_rows().map_rows(lambda part: part.reshape(*ids.shape, -1))

    def by_rows(self) -> QuantizedArray:
        """Return the same weights as they are stored; of NumPy's arrays, NumPy's."""
        one = self if self.layer is None else self.with_parts([part[self.layer] for part in self.matrix])
        numpy: Any = np if isinstance(one.codes, np.ndarray) else jnp
        halves: list[Any]
        codes, *halves = (numpy.swapaxes(part, -1, -2) for part in one.matrix)
        halves = [np.ascontiguousarray(half) if numpy is np else half for half in halves]
        halves = [half.view(np.float16) if half.dtype == np.int16 else half for half in halves]
        if self.form.scale_dtype == "bfloat16":
            halves = [half.astype(jnp.bfloat16) if half.dtype == np.float32 else half for half in halves]
        if self.form.bits < _BYTE:
            codes = codes.astype(np.uint8) + np.uint8(_taken_off(self.form))
        return QuantizedArray.of(self.form, [pack(codes, self.form), *halves])

    def dequantize(self) -> Any:
        """Return the weights in float32."""
        return self.by_rows().dequantize()


def lies_by_columns(form: Format, width: int) -> bool:
    """Whether weights of a form, in rows of ``width``, lie by columns on a TPU; those with one scale a row do not."""
    if form == MXFP4:
        return width % RUN == 0
    is_known = form.bits < _BYTE or form.levels in ((), FP8.levels)
    has_groups = form.kept is None and form.group is not None and not form.is_ordered
    return is_known and has_groups and width % max(_UNIT, form.unit) == 0


def has_whole_tiles(form: Format, width: int) -> bool:
    """Whether `pallas_kernels.quant_matmul` multiplies weights that lie by columns."""
    is_plain = form.supers is None and form.scale_dtype == "float16" and not form.has_zeros
    return form.bits == 4 and form.offset is not None and form.group in GROUPS and is_plain and width % _TILE == 0


@jax.jit
def by_columns(array: QuantizedArray) -> ColumnArray:
    """Return the same weights for TPU kernels; check `lies_by_columns` first."""
    form = array.form
    codes = array.codes if form.bits == _BYTE else array.unpacked()
    if form.bits < _BYTE:
        codes = codes.astype(jnp.uint4) if form.bits == 4 else codes.astype(jnp.int8) - jnp.int8(_taken_off(form))

    def of_chip(part: Any) -> Any:
        if part.dtype == jnp.float16:
            return jax.lax.bitcast_convert_type(part, jnp.int16)
        return part.astype(jnp.float32) if part.dtype == jnp.bfloat16 else part

    parts = [jnp.swapaxes(part, -1, -2) for part in (codes, *map(of_chip, array.matrix[1:]))]
    return ColumnArray(form=form, **{"minima": None, **dict(zip(form.part_names, parts, strict=True))})


def _taken_off(form: Format) -> int:
    """Return what codes of 5 and 6 bits are stored less."""
    return 0 if form.bits == 4 else form.offset or 0


def pack(codes: Any, form: Format) -> Any:
    """Return codes, one a byte, as they are stored (`formats`); of NumPy's arrays, NumPy's."""
    if form.bits == _BYTE:
        return codes
    numpy: Any = np if isinstance(codes, np.ndarray) else jnp
    runs = codes.reshape(*codes.shape[:-1], -1, RUN)
    low = runs & 15
    packed = [low[..., : RUN // 2] | (low[..., RUN // 2 :] << 4)]
    if form.bits > 4:
        others = form.bits - 4
        # Of 5 bits, bit i of byte j is that of code 8 j + i; of 6, bits 2 i and 2 i + 1 those of code 8 i + j.
        high = (runs >> 4).reshape(*runs.shape[:-1], RUN // 8, 8)
        axis, steps = (-1, np.arange(8)) if others == 1 else (-2, np.arange(0, 8, 2)[:, None])
        packed.append(numpy.sum(high << steps.astype(np.uint8), axis=axis, dtype=np.uint8))
    return numpy.concatenate(packed, axis=-1).reshape(*codes.shape[:-1], -1)


def widened_floats(codes_KN: Integer[Array, "K N"], exponents_GN: Integer[Array, "G N"]) -> Float[Array, "K N"]:
    """Return weights in `MXFP4`, by columns, in bfloat16, in which they are exact."""
    codes = codes_KN.astype(jnp.int32)
    sizes = codes & 7
    # Two bits of exponent and one of mantissa, moved to those of float32; 0 and 0.5 have no exponent.
    bits = jnp.where(sizes < 2, sizes * (126 << 23), (sizes << 22) + (126 << 23)) | (codes & 8) << 28
    levels = jax.lax.bitcast_convert_type(bits, jnp.float32).reshape(*exponents_GN.shape[:1], -1, codes_KN.shape[1])
    return (levels * powers_of(exponents_GN)[:, None]).reshape(codes_KN.shape).astype(jnp.bfloat16)


def layer_of(params: Any, layer: Any) -> Any:
    """Return one layer of stacked parameters; of what kernels read in place, without slicing it."""

    def taken(leaf: Any) -> Any:
        return leaf.at(layer) if isinstance(leaf, ColumnArray) else jax.tree.map(lambda part: part[layer], leaf)

    return jax.tree.map(taken, params, is_leaf=lambda node: isinstance(node, ColumnArray))


def kernels_by_columns(params: Mapping[str, Any]) -> Any:
    """Return a decoder's parameters with all kernels and tables for TPU kernels that can be."""
    return {
        key: kernels_by_columns(value)
        if isinstance(value, Mapping)
        else maybe_by_columns(value, value.shape[-1])
        if isinstance(value, QuantizedArray)
        else value
        for key, value in params.items()
    }


def maybe_by_columns(array: QuantizedArray, width: int) -> QuantizedArray:
    """Return an array by columns if TPU kernels multiply a device's ``width`` of its inputs."""
    is_stored = not isinstance(array, ColumnArray)
    return by_columns(array) if is_stored and lies_by_columns(array.form, width) else array
