"""Products with weights, accumulated in float32 or wider."""

import math

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import products


def linear(
    inputs: Float[Array, "*rows d_in"],
    kernel: Float[Array, "d_out d_in"] | Float[Array, "d_in d_out"],
    bias: Float[Array, " d_out"] | None,
    backend: Backend,
    transposed: bool = False,
) -> Float[Array, "*rows d_out"]:
    """Multiply the last axis by a kernel and add a bias; the result is in the backend's compute dtype.

    The kernel is ``[out, in]``, or ``transposed`` and ``[in, out]``.
    """
    output = product(inputs, kernel, backend, transposed)
    if bias is not None:
        output = output + bias.astype(output.dtype)
    return output.astype(backend.compute_dtype)


def product(
    inputs: Float[Array, "*rows d_in"],
    kernel: Float[Array, "d_out d_in"] | Float[Array, "d_in d_out"],
    backend: Backend,
    transposed: bool = False,
) -> Float[Array, "*rows d_out"]:
    """Multiply the last axis by a kernel, in the accumulator's dtype (float32, or float64 for float64 weights)."""
    *lead, width = inputs.shape
    count = math.prod(lead)
    contracted = 0 if transposed else 1
    accumulator = jnp.promote_types(kernel.dtype, jnp.float32)

    def multiply(rows: Array) -> Array:
        numbers = (((rows.ndim - 1,), (contracted,)), ((), ()))
        return jax.lax.dot_general(
            rows, kernel, numbers, precision=backend.precision, preferred_element_type=accumulator
        )

    inputs = inputs.astype(kernel.dtype)
    outputs = kernel.shape[1 - contracted]
    is_short = 0 < count <= backend.kernel_rows and not transposed and kernel.shape[1] == width
    if is_short and outputs and products.multiplies(kernel.dtype, width):
        rows = inputs.reshape(1, 1, count, width)
        return products.multiply(rows, jnp.asarray(kernel)[None, None], 0, outputs).reshape(*lead, outputs)
    # XLA's CPU product of one bfloat16 row runs at a tenth of the memory bandwidth; of four rows, near all of it.
    # The rows are repeated, and the equal results merged by a maximum, because a plain slice of the product makes the
    # compiler shrink it back to one row.
    repeats = -(-backend.min_matmul_rows // count)
    if repeats == 1:
        # Not flattened: rows and tokens that are split over devices could not be told apart in one axis.
        return multiply(inputs)
    output = multiply(jnp.repeat(inputs.reshape(-1, width), repeats, axis=0))
    output = jnp.max(output.reshape(count, repeats, -1), axis=1)
    return output.reshape(*lead, outputs)
