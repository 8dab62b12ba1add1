"""Products with one of a stack of kernels in few bits, such as an expert's, read where it lies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.few_bits.products import multiplies_few_bits, multiply_few_bits
from jaxinfer.ops.cpu_kernels.panels.products import multiply_panels
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.matmul import product


def multiply_stacked(
    rows_RK: Float[Array, "R K"], stacks: Sequence[QuantizedArray], place: Int[Array, ""], backend: Backend
) -> list[Float[Array, "R _"]]:
    """Return products of rows with the kernels at a place of several stacks ``[X, N, K]``, in float32.

    On a mesh it is called with one device's stacks. By the CPU kernels, a row's bits do not depend on other rows.
    """
    form, is_stored = stacks[0].form, not any(isinstance(stack, ColumnArray) for stack in stacks)
    if len(stacks) > 1 and (form.is_ordered or any(stack.form != form for stack in stacks)):
        return [multiply_stacked(rows_RK, [stack], place, backend)[0] for stack in stacks]
    panels = [stack for stack in stacks if isinstance(stack, PanelArray)]
    if 0 < len(panels) < len(stacks):
        return [multiply_stacked(rows_RK, [stack], place, backend)[0] for stack in stacks]
    if is_stored and backend.cpu_kernels and (panels or multiplies_few_bits(form, rows_RK.shape[1])):
        if form.is_ordered:
            rows_RK = rows_RK[:, lax.dynamic_index_in_dim(stacks[0].order, place, keepdims=False)[0]]
            stacks = [stacks[0].in_order()]
        if panels:
            return list(multiply_panels(rows_RK, *cast(Sequence[PanelArray], stacks), place=place))
        return list(multiply_few_bits(rows_RK, stacks[0].form, tuple(stack.matrix for stack in stacks), place))
    # As wide as sums of experts are.
    alone = replace(backend, mesh=None, compute_dtype="float32")
    return [product(rows_RK, kernel_at(stack, place), alone).astype(jnp.float32) for stack in stacks]


def kernel_at(stack: Any, place: Int[Array, ""]) -> Any:
    """Return one of a stack of kernels, in few bits or not; what TPU kernels read in place is not sliced."""
    if isinstance(stack, ColumnArray):
        return stack.at(place)
    return jax.tree.map(lambda part: lax.dynamic_index_in_dim(part, place, keepdims=False), stack)


def plain_kernel(kernel: Any, backend: Backend) -> Array:
    """Return a kernel as an array of the backend's weights, in few bits or not."""
    return kernel.dequantize().astype(backend.param_dtype) if isinstance(kernel, QuantizedArray) else kernel
