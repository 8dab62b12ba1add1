"""Weights rounded to seven bits, which a CPU reads in half of bfloat16's time; precise enough for drafting.

The bits are those of `jaxinfer.ops.cpu_kernels.tiles`: a bfloat16 holds them on top of an offset.
"""

import jax
import jax.numpy as jnp

from jaxinfer.notation import TENSOR, Array, Float, Int8
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels import products
from jaxinfer.ops.cpu_kernels.tiles import LEAST_INTEGER, MOST_INTEGER
from jaxinfer.ops.matmul import product


def rounds(kernel_ND: Array, backend: Backend) -> bool:
    """Whether rounded products with such a kernel are supported and faster."""
    is_float = jnp.issubdtype(kernel_ND.dtype, jnp.floating)
    return backend.cpu_kernels and is_float and products.multiplies(jnp.int8, kernel_ND.shape[1])


@jax.jit
def round_rows(kernel_ND: Float[Array, "N D"]) -> tuple[Int8[Array, "N D"], Float[Array, " N"]]:
    """Round each row to multiples of its own scale; return the multiples and the scales."""
    largest_N = jnp.max(jnp.abs(kernel_ND), axis=1).astype(jnp.float32)
    scale_N = largest_N / MOST_INTEGER
    scale_N = jnp.where(scale_N > 0, scale_N, 1)
    multiples_ND = jnp.clip(jnp.round(kernel_ND / scale_N[:, None]), LEAST_INTEGER, MOST_INTEGER)
    return multiples_ND.astype(jnp.int8), scale_N


def rounded_product(
    inputs: Float[Array, "*rows D"], integers_ND: Int8[Array, "N D"], scale_N: Float[Array, " N"], backend: Backend
) -> Float[Array, "*rows N"]:
    """Multiply the last axis, rounded to bfloat16, by a rounded kernel, in float32.

    Devices may have parts of its outputs.
    """
    kernel_ND = integers_ND if backend.cpu_kernels else integers_ND.astype(jnp.bfloat16)
    return product(inputs.astype(jnp.bfloat16), kernel_ND, backend, split=(TENSOR, None)) * scale_N
