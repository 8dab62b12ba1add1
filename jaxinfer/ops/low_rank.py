"""Products of each row of a batch with a low-rank pair of matrices of its own, out of a stack of them.

On a CPU each row reads its own pair (`jaxinfer.ops.cpu_kernels.low_rank`), on a TPU a kernel reads the pairs that rows
of the batch have (`pallas_kernels.low_rank`). Elsewhere all rows are multiplied by all ``down`` at once, what is not a
row's own is replaced by zeros, and all ``up`` follow: one pair a row would be copied first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import low_rank
from jaxinfer.ops.cpu_kernels.machine_code import host_vectors
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.matmul import product
from jaxinfer.ops.quantized_sums import added_over


class Bounds(NamedTuple):
    """How many different pairs rows have at the most, and, of each run of so many rows (its length), how many."""

    most: int
    runs: tuple[int, int]


# A stack of matrices, of one layer or of all.
Stack = Float[Array, "N R F"] | LayerView
_DTYPES = ("bfloat16", "float32")


def project_down(
    inputs_BTI: Float[Array, "B T I"],
    stacks: Sequence[Stack],
    ids_B: Int[Array, " B"],
    backend: Backend,
    in_axis: str | None = None,
    bounds: Bounds | None = None,
) -> list[Float[Array, "B T _"]]:
    """Return the products with each row's matrix ``[R, I]`` of several stacks; a row of a negative id has chosen none.

    What such a row gets means nothing. ``in_axis`` is the axis of a mesh that splits the inputs. ``bounds`` make a
    TPU's kernel take fewer steps.
    """
    in_axis = in_axis and even_axis(in_axis, inputs_BTI.shape[-1], backend)
    if _runs_cpu_kernels(stacks[0], backend):
        inputs_BTI, multiply = inputs_BTI.astype(jnp.float32), _project_down_on_cpu
    elif _runs_tpu_kernels(inputs_BTI.shape, stacks, backend, in_axis):
        inputs_BTI, multiply = inputs_BTI.astype(stacks[0].dtype), _tpu_kernel("project_down", backend, bounds)
    else:
        return [_masked(inputs_BTI, _whole(stack), ids_B, backend, in_axis) for stack in stacks]

    def run(inputs_BTI: Any, ids_B: Any, *stacks: Any) -> list[Any]:
        found = list(multiply(inputs_BTI, stacks, ids_B))
        if in_axis is None:
            return found
        # What means nothing may be no number, which would be sent among the others.
        found = [jnp.where((ids_B < 0)[:, None, None], 0, each) for each in found]
        return [added_over(each, in_axis, backend) for each in found]

    rows = row_axes(inputs_BTI.shape[:-1], backend)
    of_stacks = [stack_spec(stack, PartitionSpec(None, None, in_axis)) for stack in stacks]
    parts = PartitionSpec(*rows, in_axis), PartitionSpec(rows[0]), *of_stacks
    return backend.on_devices(run, parts, [PartitionSpec(*rows, None)] * len(stacks))(inputs_BTI, ids_B, *stacks)


def add_up(
    base_BTO: Float[Array, "B T O"],
    inner_BTR: Float[Array, "B T R"],
    stack: Stack,
    ids_B: Int[Array, " B"],
    backend: Backend,
    out_axis: str | None = None,
    bounds: Bounds | None = None,
) -> Float[Array, "B T O"]:
    """Return the base plus the products of ``inner`` with each row's ``[R, O]``; rows of a negative id keep their bits.

    ``out_axis`` is the axis of a mesh that splits the outputs.
    """
    out_axis = out_axis and even_axis(out_axis, base_BTO.shape[-1], backend)
    if _runs_cpu_kernels(stack, backend):
        run = _add_up_on_cpu
    elif _runs_tpu_kernels(inner_BTR.shape, [stack], backend):
        run = _tpu_kernel("add_up", backend, bounds)
    else:
        stack_NRO = _whole(stack)
        is_own_BN = ids_B[:, None] == jnp.arange(len(stack_NRO))
        every = jnp.where(is_own_BN[:, None, :, None], inner_BTR[:, :, None], 0)
        every, kernel = every.reshape(*inner_BTR.shape[:2], -1), stack_NRO.reshape(-1, stack_NRO.shape[-1])
        added_BTO = product(every, kernel, backend, transposed=True, split=(out_axis, None))
        return jnp.where((ids_B < 0)[:, None, None], base_BTO, (base_BTO + added_BTO).astype(base_BTO.dtype))
    rows = row_axes(base_BTO.shape[:-1], backend)
    outputs, of_stack = PartitionSpec(*rows, out_axis), stack_spec(stack, PartitionSpec(None, None, out_axis))
    parts = outputs, PartitionSpec(*rows, None), of_stack, PartitionSpec(rows[0])
    return backend.on_devices(run, parts, outputs)(base_BTO, inner_BTR, stack, ids_B)


def own_rows(stack: Float[Array, "N F"] | LayerView, ids_B: Int[Array, " B"]) -> Float[Array, "B F"]:
    """Return each row's own vector; what a row of a negative id gets means nothing."""
    at_B = jnp.maximum(ids_B, 0)
    flat, at_B = stack.flat(at_B) if isinstance(stack, LayerView) else (stack, at_B)
    return jnp.take(flat, at_B, axis=0)


def _masked(inputs_BTI: Any, stack_NRI: Any, ids_B: Any, backend: Backend, in_axis: str | None) -> Any:
    """Return each row's products with its matrix, out of those with all."""
    num, rank, width = stack_NRI.shape
    every = product(inputs_BTI, stack_NRI.reshape(num * rank, width), backend, split=(None, in_axis))
    is_own_BN = ids_B[:, None] == jnp.arange(num)
    # All others are zero.
    return jnp.where(is_own_BN[:, None, :, None], every.reshape(*every.shape[:-1], num, rank), 0).sum(axis=2)


def _project_down_on_cpu(inputs_BTI: Any, stacks: Sequence[Any], ids_B: Any) -> Any:
    flat, (first, *_) = zip(*map(_flat, stacks))
    return low_rank.project_down(inputs_BTI, flat, _from(first, ids_B))


def _add_up_on_cpu(base_BTO: Any, inner_BTR: Any, stack: Any, ids_B: Any) -> Any:
    flat, first = _flat(stack)
    return low_rank.add_up(base_BTO, inner_BTR, flat, _from(first, ids_B))


def _from(first: Any, ids_B: Any) -> Any:
    """Return ids that count from the first matrix of all layers."""
    return jnp.where(ids_B < 0, -1, first + ids_B)


def has_kernels(shape: tuple[int, ...], stacks: Sequence[Stack], backend: Backend) -> bool:
    """Whether a kernel multiplies inputs of this shape, reading what rows have chosen alone."""
    return _runs_cpu_kernels(stacks[0], backend) or _runs_tpu_kernels(shape, stacks, backend)


def _runs_cpu_kernels(stack: Stack, backend: Backend) -> bool:
    return backend.cpu_kernels and host_vectors() is not None and stack.dtype == jnp.float32


def _runs_tpu_kernels(
    shape: tuple[int, ...], stacks: Sequence[Stack], backend: Backend, in_axis: str | None = None
) -> bool:
    """Whether a TPU's kernel multiplies inputs of this shape, a device's part of them: vector memory has room."""
    dtypes = {jnp.dtype(stack.dtype).name for stack in stacks}
    if backend.kernels not in ("pallas", "interpret") or len(dtypes) > 1 or not dtypes <= {*_DTYPES}:
        return False
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.low_rank import fit_rows

    batch, tokens, width = shape
    width //= 1 if in_axis is None or backend.mesh is None else backend.mesh.shape[in_axis]
    rank, item = sum(stack.shape[1] for stack in stacks), jnp.dtype(stacks[0].dtype).itemsize
    return batch * tokens > 0 and fit_rows(batch, tokens, width, rank, item) > 0


def _tpu_kernel(name: str, backend: Backend, bounds: Bounds | None) -> Any:
    """Return a function of `pallas_kernels.low_rank`, for a layer's stacks, called like that of the CPU kernels."""
    import pallas_kernels.low_rank as kernels

    def run(*arguments: Any) -> Any:
        *before, stacks, ids_B = arguments
        views = stacks if isinstance(stacks, Sequence) else [stacks]
        flat, firsts = zip(*(_flat(view) for view in views))
        options = {"number": views[0].shape[0], "first": firsts[0], "interpret": backend.kernels == "interpret"}
        options |= {} if bounds is None else bounds._asdict()
        return getattr(kernels, name)(*before, flat if views is stacks else flat[0], ids_B, **options)

    return run


def _flat(stack: Any) -> tuple[Any, Any]:
    """Return matrices ``[X, R, F]``, and the place of the layer's first."""
    return stack.flat(0) if isinstance(stack, LayerView) else (stack, 0)


def _whole(stack: Stack) -> Any:
    return stack.whole() if isinstance(stack, LayerView) else stack


def joined(stack: Array | LayerView) -> Stack:
    """Return a stack ``[X, N, R, F]`` as one of ``X * N`` matrices, those of the first of X first."""
    if isinstance(stack, LayerView):
        whole = stack.stack
        return replace(stack, stack=whole.reshape(len(whole), -1, *whole.shape[3:]))
    return stack.reshape(-1, *stack.shape[2:])


def stack_spec(stack: Array | LayerView, spec: PartitionSpec) -> Any:
    """Return how a stack is split, given how one layer's is."""
    return LayerView(PartitionSpec(None, *spec), PartitionSpec()) if isinstance(stack, LayerView) else spec
