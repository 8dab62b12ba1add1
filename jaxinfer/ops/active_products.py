"""Products that read the weights of active features alone, where that is faster than reading all.

A feature is active if it is not zero in some row: a token of a batch, or a node of a tree. The more rows, the more
features are active, and the sooner a product that reads all weights in the order in which they lie is faster. On a
mesh each device decides for its own features and rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Bool, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.active import products
from jaxinfer.ops.each_device import Split, kernel_axes, row_axes
from jaxinfer.ops.matmul import product
from jaxinfer.ops.quantized_sums import added_over

# More rows are a prompt's, which have no inactive features in common.
MOST_ROWS = 64
# The largest share of active units with which leaving out the others is faster, by how many features are in a unit.
# `jaxinfer bench sparsity` measures another value.
LARGEST_SHARE = {1: 0.5, 2: 0.4}


def active_units(features: Float[Array, "*rows F"], dtype: Any) -> Bool[Array, " U"]:
    """Return which units of features some row needs; weights of a dtype are left out by units (`products.unit_of`)."""
    unit = products.unit_of(dtype)
    is_active_F = jnp.any(features.reshape(-1, features.shape[-1]) != 0, axis=0)
    return jnp.any(is_active_F.reshape(-1, unit), axis=1)


def pays(features: Float[Array, "*rows F"], dtype: Any) -> Bool[Array, ""]:
    """Whether leaving out inactive features is faster."""
    return jnp.mean(active_units(features, dtype), dtype=jnp.float32) <= LARGEST_SHARE[products.unit_of(dtype)]


def chosen_outputs(
    inputs: Any, kernels: Sequence[Any], backend: Backend, transposed: bool, split: Split, *, active: Any
) -> list[Any]:
    """Return a product with one kernel ``[out, in]`` as `jaxinfer.ops.matmul.product` does.

    Where few of ``active`` are not zero, outputs that are not active are zero, and their weights are not read.
    """
    alone, (out_axis, _) = replace(backend, mesh=None), kernel_axes(kernels, split, backend)

    def multiply(inputs: Any, active: Any, kernel: Any) -> Any:
        rows, width = inputs.reshape(-1, inputs.shape[-1]), kernel.shape[0]

        def some() -> Any:
            return products.multiply_rows(rows, active.reshape(-1, width), kernel).reshape(active.shape)

        return lax.cond(pays(active, kernel.dtype), some, lambda: product(inputs, kernel, alone, transposed))

    rows = row_axes(inputs.shape[:-1], backend)
    of_units = PartitionSpec(*rows, out_axis)
    parts = PartitionSpec(*rows, None), of_units, PartitionSpec(out_axis, None)
    return [backend.on_devices(multiply, parts, of_units)(inputs, active, kernels[0])]


def active_inputs(
    inputs: Any, kernels: Sequence[Any], backend: Backend, transposed: bool, split: Split, *, columns: Any
) -> list[Any]:
    """Return a product with one kernel ``[out, in]`` in the bits of `jaxinfer.ops.matmul.product`.

    ``columns`` are the kernel's, ``[in, out]``. Where few inputs are active, those of the others are not read.
    """
    alone, (_, in_axis) = replace(backend, mesh=None), kernel_axes(kernels, split, backend)

    def multiply(inputs: Any, kernel: Any, columns: Any) -> Any:
        def some() -> Any:
            found = products.multiply_columns(inputs.reshape(-1, inputs.shape[-1]), columns)
            return found.reshape(*inputs.shape[:-1], -1)

        found = lax.cond(pays(inputs, kernel.dtype), some, lambda: product(inputs, kernel, alone, transposed))
        return found if in_axis is None else added_over(found, in_axis, backend)

    rows = row_axes(inputs.shape[:-1], backend)
    parts = PartitionSpec(*rows, in_axis), PartitionSpec(None, in_axis), PartitionSpec(in_axis, None)
    return [backend.on_devices(multiply, parts, PartitionSpec(*rows, None))(inputs, kernels[0], columns)]
