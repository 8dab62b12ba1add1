"""Products with weights in few bits on a TPU, read as they are stored."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.few_bits.columns import ColumnArray, has_whole_tiles, widened_floats
from jaxinfer.ops.few_bits.formats import FP4, MXFP4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.rounded_rows import largest, round_rows
from jaxinfer.ops.quantized_sums import added_over

# The rows of a tile of float32.
_FEW_ROWS = 8


def multiply_columns(inputs: Any, kernel: ColumnArray, backend: Backend, split: tuple[str | None, str | None]) -> Any:
    """Return ``inputs [..., K]``, rounded to bfloat16 or the backend's activations, times a kernel ``[N, K]``.

    Each device multiplies its part.
    The result is in the compute dtype.
    """
    lead = inputs.shape[:-1]
    form, dtype = kernel.form, jnp.dtype(backend.compute_dtype)
    if not math.prod(lead):
        return jnp.zeros((*lead, kernel.shape[0]), dtype)
    out_axis, in_axis = (axis and even_axis(axis, size, backend) for axis, size in zip(split, kernel.shape))

    def multiply(inputs: Any, layer: Any, *parts: Any) -> Any:
        *lead, width = inputs.shape
        rows, scales_M = inputs.reshape(-1, width).astype(jnp.bfloat16), None
        if backend.activations is not None:
            most_M1 = largest(inputs.reshape(-1, width))
            most_M1 = most_M1 if in_axis is None else lax.pmax(most_M1, in_axis)
            rows, scales_M1 = round_rows(inputs.reshape(-1, width), most_M1)
            scales_M = scales_M1[:, 0]
        by_kernel = _multiply_tiles if has_whole_tiles(form, width) else _multiply_grouped
        run = _multiply_floats if form == MXFP4 else by_kernel
        found = run(rows, replace(kernel.with_parts(parts), layer=layer), scales_M, backend).reshape(*lead, -1)
        return found if in_axis is None else added_over(found, in_axis, backend)

    rows, stack = row_axes(lead, backend), [None] if kernel.layer is not None else []
    specs = [PartitionSpec(*stack, *spec) for spec in kernel.specs(PartitionSpec(out_axis, in_axis))]
    given = (PartitionSpec(*rows, in_axis), None if kernel.layer is None else PartitionSpec(), *specs)
    on_devices = backend.on_devices(multiply, given, PartitionSpec(*rows, out_axis))
    return on_devices(inputs, kernel.layer, *kernel.matrix)


def _multiply_tiles(rows_MK: Any, kernel: ColumnArray, scales_M: Any, backend: Backend) -> Any:
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.quant_matmul import quant_matmul
    from pallas_kernels.quant_matmul.reference import quant_matmul_reference

    by_kernel = functools.partial(quant_matmul, interpret=backend.kernels == "interpret")
    run: Any = quant_matmul_reference if backend.kernels == "reference" else by_kernel
    codes, scales, *minima = kernel.matrix
    of_groups = {"minima": minima[0] if minima else None, "offset": kernel.form.offset or 0, "layer": kernel.layer}
    dtype = jnp.dtype(backend.compute_dtype)
    return run(rows_MK, codes, scales, **of_groups, activation_scales_M=scales_M, out_dtype=dtype)


def _multiply_grouped(rows_MK: Any, kernel: ColumnArray, scales_M: Any, backend: Backend) -> Any:
    """Return products with a kernel that is the expert of all rows; by XLA where a chip has no room for a block."""
    from pallas_kernels.grouped_matmul import fit_rows, grouped_matmul
    from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference

    count, width = rows_MK.shape
    codes = codes_of(kernel if kernel.layer is not None else kernel.with_parts([part[None] for part in kernel.matrix]))
    rows = fit_rows(count, width, 1, jnp.dtype(jnp.bfloat16).itemsize, form=codes.form)
    if not rows:
        weights_NK = kernel.dequantize().astype(jnp.bfloat16)
        found = lax.dot_general(
            rows_MK.astype(jnp.bfloat16), weights_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    else:
        blocks = -(-count // rows)
        by_kernel = functools.partial(grouped_matmul, interpret=backend.kernels == "interpret", read=(1, count))
        run: Any = grouped_matmul_reference if backend.kernels == "reference" else by_kernel
        filled = jnp.pad(rows_MK.astype(jnp.bfloat16), ((0, blocks * rows - count), (0, 0)))
        first = 0 if kernel.layer is None else kernel.layer
        found = run(filled, [codes], jnp.zeros((blocks,), jnp.int32), jnp.int32(blocks), first_expert=first)[:count]
    found = found if scales_M is None else found * scales_M[:, None]
    return found.astype(backend.compute_dtype)


def _multiply_floats(rows_MK: Any, kernel: ColumnArray, _: Any, backend: Backend) -> Any:
    """Return products with 4-bit floats, widened where they are multiplied."""
    codes, scales = kernel.matrix
    if kernel.layer is not None:
        codes, scales = (lax.dynamic_index_in_dim(part, kernel.layer, keepdims=False) for part in (codes, scales))
    count = len(rows_MK)
    # For one row the compiler would multiply without its matrix unit.
    rows_MK = jnp.pad(rows_MK, ((0, max(0, _FEW_ROWS - count)), (0, 0)))
    found = jnp.dot(rows_MK, widened_floats(codes, scales), preferred_element_type=jnp.float32)
    return found[:count].astype(backend.compute_dtype)


def codes_of(stack: QuantizedArray) -> Any:
    """Return a stack of kernels as the grouped product takes it; of described ones, what describes their form."""
    from pallas_kernels.grouped_matmul import Codes

    form = stack.form
    if not isinstance(stack, ColumnArray):
        return Codes(stack.codes, stack.scales[..., 0], kind="integer" if form.offset is not None else "e4m3")
    parts = {name: getattr(stack, name) for name in form.part_names}
    if form.offset is not None:
        return Codes(**parts, offset=form.offset if form.bits == 4 else 0)
    if form.bits == 4 and form.levels != FP4:
        return Codes(**parts, kind="levels", levels=form.levels)
    return Codes(**parts, kind="e2m1" if form.bits == 4 else "e4m3")
