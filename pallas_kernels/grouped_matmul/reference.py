"""The reference of `grouped_matmul`, in plain JAX and float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.codes import Codes, widened


def grouped_matmul_reference(
    x_YD: jax.Array,
    kernels: Sequence[jax.Array | Codes],
    experts_X: jax.Array,
    count: jax.Array,
    *,
    first_expert: jax.Array | int = 0,
    biases: Sequence[jax.Array] | None = None,
    combine: Callable[..., Any] | None = None,
    rounded_to: jax.typing.DTypeLike = jnp.bfloat16,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Multiply one block after the other; arguments and result are those of `grouped_matmul`.

    Rows of blocks that are not run are zeros.
    """
    rows = len(x_YD) // len(experts_X)

    def multiply(block_XD: Any) -> jax.Array:
        index, block_RD = block_XD
        expert = experts_X[index]
        products = []
        for place, kernel in enumerate(kernels):
            own = _expert_of(kernel, first_expert + expert)
            product = jnp.dot(block_RD.astype(jnp.float32), own.T, precision=lax.Precision.HIGHEST)
            if biases is not None:
                product += lax.dynamic_index_in_dim(biases[place], expert).astype(jnp.float32)
            products.append(product)
        if combine is not None:
            products = [combine(*(product.astype(rounded_to).astype(jnp.float32) for product in products))]
        return jnp.where(index < count, products[0], 0).astype(out_dtype)

    blocks = jnp.arange(len(experts_X)), x_YD.reshape(-1, rows, x_YD.shape[1])
    return lax.map(multiply, blocks).reshape(len(x_YD), -1)


def _expert_of(kernel: Any, expert: Any) -> jax.Array:
    """Return one expert's kernel in float32."""
    if not isinstance(kernel, Codes):
        return lax.dynamic_index_in_dim(kernel, expert, keepdims=False).astype(jnp.float32)
    own = {name: lax.dynamic_index_in_dim(part, expert) for name, part in kernel.parts.items()}
    return widened(kernel._replace(**own))[0]
