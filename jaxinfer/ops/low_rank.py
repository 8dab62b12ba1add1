"""Products of each row of a batch with a low-rank pair of matrices of its own, out of a stack of them.

On a CPU each row reads its own pair (`jaxinfer.ops.cpu_kernels.low_rank`). Elsewhere all rows are multiplied by all
``down`` at once, what is not a row's own is replaced by zeros, and all ``up`` follow: a matrix unit does that while it
reads them, each once, where one pair a row would be copied first.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import low_rank
from jaxinfer.ops.cpu_kernels.machine_code import host_vectors
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.matmul import product
from jaxinfer.ops.quantized_sums import added_over


def project_down(
    inputs_BTI: Float[Array, "B T I"],
    stacks: Sequence[Float[Array, "N R I"]],
    ids_B: Int[Array, " B"],
    backend: Backend,
    in_axis: str | None = None,
) -> list[Any]:
    """Return what `add_up` takes of the inputs, for each of several stacks; rows of a negative id have chosen nothing.

    ``in_axis`` is the axis of a mesh that splits the inputs.
    """
    if not _runs_kernels(stacks[0], backend):
        return [_masked(inputs_BTI, stack, ids_B, backend, in_axis) for stack in stacks]
    in_axis = in_axis and even_axis(in_axis, inputs_BTI.shape[-1], backend)

    def multiply(inputs_BTI: Any, ids_B: Any, *stacks: Any) -> list[Any]:
        found = low_rank.project_down(inputs_BTI, stacks, ids_B)
        return [one if in_axis is None else added_over(one, in_axis, backend) for one in found]

    rows = row_axes(inputs_BTI.shape[:-1], backend)
    parts = PartitionSpec(*rows, in_axis), PartitionSpec(rows[0]), *[PartitionSpec(None, None, in_axis)] * len(stacks)
    run = backend.on_devices(multiply, parts, [PartitionSpec(*rows, None)] * len(stacks))
    return run(inputs_BTI.astype(jnp.float32), ids_B, *stacks)


def spread(inner_BTR: Any, stack_NRO: Float[Array, "N R O"], ids_B: Int[Array, " B"], backend: Backend) -> Any:
    """Return rows' values in front of their own matrices as `add_up` takes them."""
    if _runs_kernels(stack_NRO, backend):
        return inner_BTR
    is_own_BN = ids_B[:, None] == jnp.arange(stack_NRO.shape[0])
    every = jnp.where(is_own_BN[:, None, :, None], inner_BTR[:, :, None], 0)
    return every.reshape(*inner_BTR.shape[:2], -1)


def own_products(
    inputs_BTI: Float[Array, "B T I"], stack_NKI: Float[Array, "N K I"], ids_B: Int[Array, " B"], backend: Backend
) -> Float[Array, "B T K"]:
    """Return the dot products with the rows of each row's own matrix; those of a row of a negative id mean nothing."""
    (found,) = project_down(inputs_BTI, [stack_NKI], ids_B, backend)
    if _runs_kernels(stack_NKI, backend):
        return found
    # All others are zero.
    return found.reshape(*found.shape[:2], *stack_NKI.shape[:2]).sum(axis=2)


def add_up(
    base_BTO: Float[Array, "B T O"],
    inner: Any,
    stack_NRO: Float[Array, "N R O"],
    ids_B: Int[Array, " B"],
    backend: Backend,
    out_axis: str | None = None,
) -> Float[Array, "B T O"]:
    """Return the base plus the products of ``inner`` with each row's matrix; rows of a negative id keep their bits.

    ``out_axis`` is the axis of a mesh that splits the outputs.
    """
    if not _runs_kernels(stack_NRO, backend):
        kernel = stack_NRO.reshape(-1, stack_NRO.shape[-1])
        added_BTO = product(inner, kernel, backend, transposed=True, split=(out_axis, None))
        return jnp.where((ids_B < 0)[:, None, None], base_BTO, (base_BTO + added_BTO).astype(base_BTO.dtype))
    out_axis = out_axis and even_axis(out_axis, base_BTO.shape[-1], backend)
    rows = row_axes(base_BTO.shape[:-1], backend)
    outputs = PartitionSpec(*rows, out_axis)
    parts = outputs, PartitionSpec(*rows, None), PartitionSpec(None, None, out_axis), PartitionSpec(rows[0])
    return backend.on_devices(low_rank.add_up, parts, outputs)(base_BTO, inner, stack_NRO, ids_B)


def _masked(inputs_BTI: Any, stack_NRI: Any, ids_B: Any, backend: Backend, in_axis: str | None) -> Any:
    """Return the products with all matrices side by side, zero but for each row's own."""
    num, rank, width = stack_NRI.shape
    every = product(inputs_BTI, stack_NRI.reshape(num * rank, width), backend, split=(None, in_axis))
    is_own_BN = ids_B[:, None] == jnp.arange(num)
    own = jnp.where(is_own_BN[:, None, :, None], every.reshape(*every.shape[:-1], num, rank), 0)
    return own.reshape(every.shape)


def _runs_kernels(stack: Any, backend: Backend) -> bool:
    return backend.cpu_kernels and host_vectors() is not None and stack.dtype == jnp.float32
