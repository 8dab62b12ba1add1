"""Quantized arrays as TPUs read them: codes ``[in, out]``, four bits each, and float16 as bits of int16.

A TPU's matrix unit takes a kernel's inputs along its rows, packs four bits itself, and knows no float16. Integers are
multiplied by a kernel; of 4-bit floats, whose scales are powers of two, the compiler widens codes inside the product.
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
from jaxinfer.ops.few_bits.formats import GROUPS, MXFP4, RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, powers_of

# The rows of a kernel ``[in, out]`` that the matrix unit takes at once.
_TILE = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColumnArray(QuantizedArray):
    """Weights ``[..., N, K]``: codes ``[..., K, N]`` in uint4, scales and minima ``[..., G, N]`` in int16 or uint8.

    With ``layer``, the parts are stacks ``[L, ...]``, of which this is that layer: a kernel reads it where it lies.
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
        """Refuse: a table lies by rows."""
        raise TypeError("rows of codes that lie by columns")

    def by_rows(self) -> QuantizedArray:
        """Return the same weights as they are stored; of NumPy's arrays, NumPy's."""
        one = self if self.layer is None else self.with_parts([part[self.layer] for part in self.matrix])
        numpy: Any = np if isinstance(one.codes, np.ndarray) else jnp
        halves: list[Any]
        codes, *halves = (numpy.swapaxes(part, -1, -2) for part in one.matrix)
        halves = [np.ascontiguousarray(half) if numpy is np else half for half in halves]
        scales, *minima = (half if half.dtype == np.uint8 else half.view(np.float16) for half in halves)
        runs = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, RUN)
        packed = (runs[..., : RUN // 2] | (runs[..., RUN // 2 :] << 4)).reshape(*codes.shape[:-1], -1)
        return QuantizedArray.of(self.form, [packed, scales, *minima])

    def dequantize(self) -> Any:
        """Return the weights in float32."""
        return self.by_rows().dequantize()


def lies_by_columns(form: Format, width: int) -> bool:
    """Whether weights of a form, in rows of ``width``, lie by columns on a TPU."""
    if form == MXFP4:
        return width % RUN == 0
    return (
        form.bits == 4
        and form.offset is not None
        and form.group in GROUPS
        and form.supers is None
        and form.scale_dtype == "float16"
        and not (form.has_zeros or form.is_ordered)
        and width % _TILE == 0
    )


@jax.jit
def by_columns(array: QuantizedArray) -> ColumnArray:
    """Return the same weights for TPU kernels; check `lies_by_columns` first."""
    halves = [
        part if part.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(part, jnp.int16) for part in array.matrix[1:]
    ]
    parts = [jnp.swapaxes(part, -1, -2) for part in (array.unpacked().astype(jnp.uint4), *halves)]
    return ColumnArray(parts[0], parts[1], parts[2] if len(parts) > 2 else None, form=array.form)


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
    """Return a decoder's parameters with all kernels for TPU kernels that can be; tables are read by rows."""
    return {
        key: kernels_by_columns(value)
        if isinstance(value, Mapping) and key != "embed"
        else maybe_by_columns(value, value.shape[-1])
        if isinstance(value, QuantizedArray)
        else value
        for key, value in params.items()
    }


def maybe_by_columns(array: QuantizedArray, width: int) -> QuantizedArray:
    """Return an array by columns if TPU kernels multiply a device's ``width`` of its inputs."""
    is_stored = not isinstance(array, ColumnArray)
    return by_columns(array) if is_stored and lies_by_columns(array.form, width) else array
