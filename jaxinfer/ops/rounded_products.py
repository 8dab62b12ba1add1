"""Products of rows in int8 with quantized kernels: bytes times bytes, added in int32 and scaled in float32.

Each row has one scale (`jaxinfer.ops.few_bits.rounded_rows`), on a mesh that splits it too: so every device rounds its
part of a row as one device would the whole. Where kernels have one scale a row, what devices add up are then integers,
and sums in float32 are those of one device in every bit.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.rounded_rows.products import (
    has_rounded_kernels,
    multiply_rounded_rows,
    padded_rows,
    round_rows_by_kernel,
)
from jaxinfer.ops.each_device import Split, kernel_axes, row_axes
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.rounded_rows import RoundedRows, largest, round_rows
from jaxinfer.ops.quantized_sums import added_over
from jaxinfer.ops.rounding import rounded


def multiply_rounded(
    inputs: Float[Array, "*rows d_in"], kernels: Sequence[QuantizedArray], backend: Backend, split: Split
) -> list[Float[Array, "*rows _"]]:
    """Return products of rows, rounded to int8, with kernels of one form, in float32 or the compute dtype.

    Check `rounded_rows.multiplies_rounded` first. Derivatives are those of products with rows as they are.
    """
    lead = inputs.shape[:-1]
    if not math.prod(lead):
        return [jnp.zeros((*lead, kernel.shape[0]), backend.compute_dtype) for kernel in kernels]
    form = kernels[0].form
    out_axis, in_axis = kernel_axes(kernels, split, backend)

    def multiply(inputs: Any, *matrices: Any) -> list[Any]:
        *lead, width = inputs.shape
        outputs = _products(inputs.reshape(-1, width), matrices, form, in_axis, backend)
        return [output.reshape(*lead, -1) for output in outputs]

    rows = row_axes(lead, backend)
    of_kernel = tuple(kernels[0].specs(PartitionSpec(out_axis, in_axis)))
    given = PartitionSpec(*rows, in_axis), *[of_kernel] * len(kernels)
    run = backend.on_devices(multiply, given, PartitionSpec(*rows, out_axis))
    return run(inputs, *(kernel.matrix for kernel in kernels))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _products(
    rows_MK: Array, matrices: tuple[Any, ...], form: Format, in_axis: str | None, backend: Backend
) -> list[Array]:
    """Return a device's products, added up over the devices along ``in_axis``."""
    by_kernel = backend.cpu_kernels and has_rounded_kernels(form, rows_MK.shape[1])
    if in_axis is None and by_kernel:
        return list(multiply_rounded_rows(round_rows_by_kernel(rows_MK, form.group), form, matrices))
    most_M1 = largest(rows_MK)
    rows = round_rows(rows_MK, most_M1 if in_axis is None else lax.pmax(most_M1, in_axis))
    # Elsewhere sums in the compute dtype are half as long to send.
    adds_integers = form.group is None and backend.collectives is None and backend.platform == "cpu"
    if by_kernel:
        has_scales = in_axis is None or not adds_integers
        outputs = list(multiply_rounded_rows(padded_rows(rows, form.group), form, matrices, has_scales))
    else:
        outputs = [_multiply_by_xla(rows, form, matrix, in_axis is None or not adds_integers) for matrix in matrices]
    if in_axis is None:
        return outputs
    if not adds_integers:
        return [added_over(output.astype(backend.compute_dtype), in_axis, backend) for output in outputs]
    return [_scaled(lax.psum(output, in_axis), rows, matrix) for output, matrix in zip(outputs, matrices)]


@_products.defjvp
def _products_jvp(form: Format, in_axis: str | None, backend: Backend, primals: Any, tangents: Any) -> Any:
    def plain(rows_MK: Array, matrices: tuple[Any, ...]) -> list[Array]:
        dense = [QuantizedArray.of(form, matrix).dequantize() for matrix in matrices]
        outputs = [jnp.matmul(rows_MK.astype(jnp.float32), each.T, precision=lax.Precision.HIGHEST) for each in dense]
        return outputs if in_axis is None else [lax.psum(output, in_axis) for output in outputs]

    found = _products(*primals, form, in_axis, backend)
    slopes = jax.jvp(plain, primals, tangents)[1]
    return found, [slope.astype(output.dtype) for slope, output in zip(slopes, found)]


def _multiply_by_xla(rows: RoundedRows, form: Format, matrix: Any, has_scales: bool) -> Array:
    """Return products in float32 or, without scales, those of the codes in int32."""
    array = QuantizedArray.of(form, matrix)
    if form.group is None:
        whole = _dots(rows.codes_MK, array.codes)
        return _scaled(whole, rows, matrix) if has_scales else whole
    count, outputs, size = rows.codes_MK.shape[0], array.shape[0], form.group
    levels_NK = (array.codes if form.bits == 8 else array.unpacked()).astype(jnp.int8) - jnp.int8(form.offset or 0)

    def add_group(group: Any, total_MN: Array) -> Array:
        codes_MW, levels_NW = (
            lax.dynamic_slice_in_dim(each, group * size, size, axis=1) for each in (rows.codes_MK, levels_NK)
        )
        found_MN = _dots(codes_MW, levels_NW).astype(jnp.float32) * array.scales[:, group].astype(jnp.float32)
        if array.minima is not None:
            sums_M1 = jnp.sum(codes_MW.astype(jnp.int32), axis=1, keepdims=True)
            found_MN += sums_M1.astype(jnp.float32) * array.minima[:, group].astype(jnp.float32)
        return total_MN + found_MN

    total_MN = lax.fori_loop(0, form.groups(array.shape[1]), add_group, jnp.zeros((count, outputs), jnp.float32))
    return total_MN * rows.scales_M1


def _dots(codes_MK: Array, levels_NK: Array) -> Array:
    return lax.dot_general(codes_MK, levels_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _scaled(whole_MN: Array, rows: RoundedRows, matrix: Any) -> Array:
    # Kept apart from what is added to them, as a kernel keeps them.
    return rounded(whole_MN.astype(jnp.float32) * matrix[1][:, 0].astype(jnp.float32) * rows.scales_M1)
