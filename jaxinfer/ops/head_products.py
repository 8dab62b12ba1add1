"""Products of each head with a matrix of its own."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.notation import TENSOR, Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import products
from jaxinfer.ops.each_device import even_axis, row_axes


def multiply_heads(
    heads_BTNI: Float[Array, "B T N d_in"], matrices_NOI: Float[Array, "N d_out d_in"], backend: Backend
) -> Float[Array, "B T N d_out"]:
    """Multiply every head by its matrix; the result is in the backend's compute dtype.

    With the CPU kernels, a token's bits do not depend on the other tokens or on their number.
    """
    dtype, (num_heads, _, width) = matrices_NOI.dtype, matrices_NOI.shape
    rows = heads_BTNI.astype(dtype)
    if not (backend.cpu_kernels and math.prod(heads_BTNI.shape) and products.multiplies(dtype, width)):
        found_NBTO = jax.lax.dot_general(
            rows,
            matrices_NOI,
            (((3,), (2,)), ((2,), (0,))),
            precision=backend.precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
        return jnp.moveaxis(found_NBTO, 0, 2).astype(backend.compute_dtype)

    def multiply(rows_BTNI: Any, matrices_NOI: Any) -> Any:
        batch, tokens, own, width = rows_BTNI.shape
        rows_N1MI = jnp.moveaxis(rows_BTNI, 2, 0).reshape(own, 1, -1, width)
        (found_N1MO,) = products.multiply_by_each(rows_N1MI, (matrices_NOI[None],), 0, (matrices_NOI.shape[1],))
        return jnp.moveaxis(found_N1MO.reshape(own, batch, tokens, -1), 0, 2)

    lead, heads = row_axes(heads_BTNI.shape[:2], backend), even_axis(TENSOR, num_heads, backend)
    spec = PartitionSpec(*lead, heads, None)
    run = backend.on_devices(multiply, (spec, PartitionSpec(heads, None, None)), spec)
    return run(rows, matrices_NOI).astype(backend.compute_dtype)
