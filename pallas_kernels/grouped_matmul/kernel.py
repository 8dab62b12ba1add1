"""The bodies of `grouped_matmul`: one block of rows by one block of outputs of the expert that they go to.

Whole rows are multiplied at once, so that the order of a row's sums depends on its width alone.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.codes import FLOAT8, Form
from pallas_kernels.grouped_matmul.columns import float8_to_bfloat16

Finish = Callable[[list[Any], Any, Any], None]


def finish_of(combine: Callable[..., Any] | None, rounded_to: Any) -> Finish:
    """Return what adds biases to products, which ``combine`` makes one of, and writes that.

    Before, each is rounded to ``rounded_to``.
    """

    def finish(products: list[Any], biases: Any, out_ref: Any) -> None:
        if biases:
            products = [product + bias[...].astype(jnp.float32) for product, bias in zip(products, biases)]
        if combine is not None:
            # Older chips compute nothing but products in bfloat16.
            products = [combine(*(product.astype(rounded_to).astype(jnp.float32) for product in products))]
        out_ref[...] = products[0].astype(out_ref.dtype)

    return finish


def rows_body(num_kernels: int, form: Form | None, finish: Finish, precision: lax.Precision) -> Callable[..., None]:
    """Return the body for ``num_kernels`` kernels that lie by rows, in few bits if they have a form."""
    per_kernel = 1 if form is None else 2

    def body(_first: Any, _experts: Any, _rows: Any, _outputs: Any, x_ref: Any, *refs: Any) -> None:
        *of_experts, out_ref = refs
        rows = x_ref[...]
        products = []
        for index in range(num_kernels):
            kernel_ref, *scales = of_experts[index * per_kernel : (index + 1) * per_kernel]
            is_float = form is not None and form.kind == FLOAT8
            kernel = float8_to_bfloat16(kernel_ref[...]) if is_float else kernel_ref[...].astype(rows.dtype)
            numbers = (((1,), (1,)), ((), ()))
            product = lax.dot_general(rows, kernel, numbers, precision=precision, preferred_element_type=jnp.float32)
            products.append(product * scales[0][...] if scales else product)
        finish(products, of_experts[num_kernels * per_kernel :], out_ref)

    return body
