"""The body of `grouped_matmul`: one block of rows by one block of outputs of the expert that they go to.

Whole rows are multiplied at once, so that the order of a row's sums depends on its width alone.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def product_body(
    num_kernels: int, is_biased: bool, combine: Callable[..., Any] | None, rounded_to: Any, precision: lax.Precision
) -> Callable[..., None]:
    """Return the body for products with ``num_kernels`` kernels, which ``combine`` makes one of.

    Before, each is rounded to ``rounded_to``.
    """

    def body(_first: Any, _experts: Any, _rows: Any, _outputs: Any, x_ref: Any, *refs: Any) -> None:
        *of_experts, out_ref = refs
        kernels, biases = of_experts[:num_kernels], of_experts[num_kernels:]
        rows = x_ref[...]
        numbers = (((1,), (1,)), ((), ()))
        products = [
            lax.dot_general(
                rows,
                kernel_ref[...].astype(rows.dtype),
                numbers,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for kernel_ref in kernels
        ]
        if is_biased:
            products = [product + bias[...].astype(jnp.float32) for product, bias in zip(products, biases)]
        if combine is not None:
            # Older chips compute nothing but products in bfloat16.
            products = [combine(*(product.astype(rounded_to).astype(jnp.float32) for product in products))]
        out_ref[...] = products[0].astype(out_ref.dtype)

    return body
