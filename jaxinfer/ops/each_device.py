"""Runs kernels on every device of a mesh, each on its parts of the arguments; the compiler cannot split a kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxinfer.notation import SEQUENCE, TENSOR
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.logical_axes import RowAxes, split_rows

# The axes of a mesh that split a kernel's outputs and its inputs.
Split = tuple[str | None, str | None]
WHOLE: Split = (None, None)

# The fewest tokens that are a prompt's. If a step's were split, so would be all that it computes of them, and devices
# would exchange it again and again.
_FEWEST_TOKENS = 128


def on_each_device(function: Callable[..., Any], backend: Backend, layouts: str, results: str) -> Callable[..., Any]:
    """Return ``function`` so that each device runs it on its heads and rows; unchanged if there is one device.

    One letter per argument, or result, gives its layout: ``h`` is ``[B, T, N, H]``, split by heads; ``f`` is ``[B, T,
    F]`` and ``c`` the cache ``[L, B, S, F]``, split by lanes; ``p`` are pages ``[L, P, Z, F]``, split by lanes alone,
    with queries as the first argument; ``r`` is split by rows; ``a`` is the same on all devices. ``q`` is ``h`` and
    ``m`` is ``[B, T, ...]``, split by a prompt's tokens too. ``n`` is ``[N]``, split by heads. What does not split
    evenly is on every device.
    """
    if backend.mesh is None:
        return function

    def run(*arguments: Any) -> Any:
        # Pages are of any row.
        of_queries = arguments[0].shape[0] if "p" in layouts else None
        rows = rows_axis(of_queries or arguments[layouts.index("c")].shape[1], backend)
        tokens = tokens_axis(arguments[layouts.index("q")].shape[1], backend) if "q" in layouts else None
        specs = {
            "h": PartitionSpec(rows, None, TENSOR, None),
            "f": PartitionSpec(rows, None, TENSOR),
            "c": PartitionSpec(None, rows, None, TENSOR),
            "p": PartitionSpec(None, None, None, TENSOR),
            "r": PartitionSpec(rows),
            "a": PartitionSpec(),
            "q": PartitionSpec(rows, tokens, TENSOR, None),
            "m": PartitionSpec(rows, tokens),
            "n": PartitionSpec(TENSOR),
        }
        given = tuple(specs[letter] for letter in layouts)
        returned = tuple(specs[letter] for letter in results)
        return backend.on_devices(function, given, returned if len(results) > 1 else returned[0])(*arguments)

    return run


def rows_axis(batch: int, backend: Backend) -> RowAxes:
    """Return the axis, or axes, that split the rows, if they split evenly."""
    return None if backend.mesh is None else split_rows(batch, backend.mesh, backend.rows_over_experts)


def tokens_axis(num_tokens: int, backend: Backend) -> str | None:
    """Return the axis that splits the tokens of a prompt, if they split evenly."""
    return even_axis(SEQUENCE, num_tokens, backend) if num_tokens >= _FEWEST_TOKENS else None


def row_axes(shape: Sequence[int], backend: Backend) -> tuple[RowAxes, ...]:
    """Return what splits each of an array's leading axes: its rows, their tokens, and whatever follows."""
    found = [split(size, backend) for split, size in zip((rows_axis, tokens_axis), shape)]
    return *found, *[None] * (len(shape) - len(found))


def kernel_axes(kernels: Sequence[Any], split: Split, backend: Backend) -> Split:
    """Return the axes that split all of the kernels' outputs evenly, and their inputs."""
    # What divides their greatest common divisor divides all of them.
    sizes = math.gcd(*(kernel.shape[0] for kernel in kernels)), kernels[0].shape[1]
    out_axis, in_axis = (axis and even_axis(axis, size, backend) for axis, size in zip(split, sizes))
    return out_axis, in_axis


def even_axis(axis: str, size: int, backend: Backend) -> str | None:
    """Return the axis if it has several devices and splits ``size`` evenly."""
    devices = 1 if backend.mesh is None else backend.mesh.shape[axis]
    return axis if devices > 1 and size % devices == 0 else None
