"""Products with weights in four bits on a TPU, read as they are stored."""

import functools
import math
from typing import Any, TypeGuard

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.few_bits.columns import ColumnArray, lies_by_columns, widened_floats
from jaxinfer.ops.few_bits.formats import MXFP4
from jaxinfer.ops.few_bits.rounded_rows import largest, round_rows
from jaxinfer.ops.quantized_sums import added_over

# The rows of a tile of float32.
_FEW_ROWS = 8


def is_multiplied_by_columns(kernel: Any, backend: Backend) -> TypeGuard[ColumnArray]:
    """Whether `multiply_columns` serves a kernel; of forms in which experts alone lie so, it does not."""
    is_laid = isinstance(kernel, ColumnArray) and backend.kernels != "xla"
    return is_laid and lies_by_columns(kernel.form, kernel.shape[-1])


def multiply_columns(inputs: Any, kernel: ColumnArray, backend: Backend, split: tuple[str | None, str | None]) -> Any:
    """Return ``inputs [..., K]``, rounded to bfloat16 or the backend's activations, times a kernel ``[N, K]``.

    Each device multiplies its part.
    The result is in the compute dtype.
    """
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.quant_matmul import quant_matmul
    from pallas_kernels.quant_matmul.reference import quant_matmul_reference

    lead = inputs.shape[:-1]
    form, dtype = kernel.form, jnp.dtype(backend.compute_dtype)
    if not math.prod(lead):
        return jnp.zeros((*lead, kernel.shape[0]), dtype)
    out_axis, in_axis = (axis and even_axis(axis, size, backend) for axis, size in zip(split, kernel.shape))
    by_kernel = functools.partial(quant_matmul, interpret=backend.kernels == "interpret")
    run: Any = quant_matmul_reference if backend.kernels == "reference" else by_kernel
    run = _multiply_floats if form == MXFP4 else run

    def multiply(inputs: Any, layer: Any, codes: Any, scales: Any, minima: Any = None) -> Any:
        *lead, width = inputs.shape
        rows, scales_M = inputs.reshape(-1, width).astype(jnp.bfloat16), None
        if backend.activations is not None:
            most_M1 = largest(inputs.reshape(-1, width))
            most_M1 = most_M1 if in_axis is None else lax.pmax(most_M1, in_axis)
            rows, scales_M1 = round_rows(inputs.reshape(-1, width), most_M1)
            scales_M = scales_M1[:, 0]
        of_groups = {"minima": minima, "offset": form.offset or 0, "layer": layer}
        found = run(rows, codes, scales, **of_groups, activation_scales_M=scales_M, out_dtype=dtype)
        found = found.reshape(*lead, -1)
        return found if in_axis is None else added_over(found, in_axis, backend)

    rows, stack = row_axes(lead, backend), [None] if kernel.layer is not None else []
    specs = [PartitionSpec(*stack, *spec) for spec in kernel.specs(PartitionSpec(out_axis, in_axis))]
    given = (PartitionSpec(*rows, in_axis), None if kernel.layer is None else PartitionSpec(), *specs)
    on_devices = backend.on_devices(multiply, given, PartitionSpec(*rows, out_axis))
    return on_devices(inputs, kernel.layer, *kernel.matrix)


def _multiply_floats(rows_MK: Any, codes: Any, scales: Any, *, layer: Any, out_dtype: Any, **_: Any) -> Any:
    """Return products with 4-bit floats, of a layer of a stack if there is one, widened where they are multiplied."""
    if layer is not None:
        codes, scales = (lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (codes, scales))
    count = len(rows_MK)
    # For one row the compiler would multiply without its matrix unit.
    rows_MK = jnp.pad(rows_MK, ((0, max(0, _FEW_ROWS - count)), (0, 0)))
    return jnp.dot(rows_MK, widened_floats(codes, scales), preferred_element_type=jnp.float32)[:count].astype(out_dtype)
