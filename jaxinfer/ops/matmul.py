"""Products with weights, accumulated in float32 or wider."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.column_products import multiply_columns
from jaxinfer.ops.cpu_kernels import products
from jaxinfer.ops.cpu_kernels.few_bits.products import multiplies_few_bits, multiply_few_bits
from jaxinfer.ops.cpu_kernels.panels.products import multiply_panels
from jaxinfer.ops.each_device import WHOLE, Split, even_axis, kernel_axes, row_axes
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.formats import FP8, INT8
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.rounded_rows import multiplies_rounded
from jaxinfer.ops.quantized_sums import added_over
from jaxinfer.ops.rounded_products import multiply_rounded

# The rows of a tile of float32.
_FEW_ROWS = 8


def linear(
    inputs: Float[Array, "*rows d_in"],
    kernel: Float[Array, "d_out d_in"] | Float[Array, "d_in d_out"] | QuantizedArray,
    bias: Float[Array, " d_out"] | None,
    backend: Backend,
    transposed: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "*rows d_out"]:
    """Multiply the last axis by a kernel and add a bias; the result is in the backend's compute dtype.

    The kernel is ``[out, in]``, or ``transposed`` and ``[in, out]``; a quantized one is never transposed. If devices
    have parts of it, ``split`` says which; only the CPU kernels need to know.
    """
    return linears(inputs, [(kernel, bias)], backend, transposed, split)[0]


def linears(
    inputs: Float[Array, "*rows d_in"],
    weights: Sequence[tuple[Any, Any]],
    backend: Backend,
    transposed: bool = False,
    split: Split = WHOLE,
    products: Callable[..., list[Any]] | None = None,
) -> list[Float[Array, "*rows _"]]:
    """Apply `linear` with each of several kernels and their biases, in one call if that is faster.

    ``products`` multiplies by the kernels in another way (`jaxinfer.ops.active_products`).
    """
    outputs = (products or _products)(inputs, [kernel for kernel, _ in weights], backend, transposed, split)
    biases = [bias for _, bias in weights]
    outputs = [output if bias is None else output + bias.astype(output.dtype) for output, bias in zip(outputs, biases)]
    return [output.astype(backend.compute_dtype) for output in outputs]


def product(
    inputs: Float[Array, "*rows d_in"],
    kernel: Float[Array, "d_out d_in"] | Float[Array, "d_in d_out"] | QuantizedArray,
    backend: Backend,
    transposed: bool = False,
    split: Split = WHOLE,
) -> Float[Array, "*rows d_out"]:
    """Multiply the last axis by a kernel, in the accumulator's dtype (float32, or float64 for float64 weights)."""
    if isinstance(kernel, ColumnArray):
        # Its kernels round sums to the compute dtype themselves.
        backend = replace(backend, compute_dtype="float32")
    return _products(inputs, [kernel], backend, transposed, split)[0]


def _products(inputs: Any, kernels: Sequence[Any], backend: Backend, transposed: bool, split: Split) -> list[Any]:
    is_quantized = [isinstance(kernel, QuantizedArray) for kernel in kernels]
    if all(is_quantized):
        return _quantized_products(inputs, kernels, backend, split)
    if any(is_quantized):
        return [_products(inputs, [kernel], backend, transposed, split)[0] for kernel in kernels]
    own = None if transposed else _multiply_by_kernels(inputs, kernels, backend, split)
    if own is not None:
        return own
    apart = [_multiply_apart(inputs, kernel, backend, transposed, split) for kernel in kernels]
    return [
        multiply_by_xla(inputs, kernel, backend, transposed) if found is None else found
        for kernel, found in zip(kernels, apart)
    ]


def _quantized_products(inputs: Any, kernels: Sequence[QuantizedArray], backend: Backend, split: Split) -> list[Any]:
    """Return products with quantized kernels: by the CPU kernels, in their own bits, or else by XLA."""
    form = kernels[0].form
    if any(kernel.form != form or type(kernel) is not type(kernels[0]) for kernel in kernels) or (
        form.is_ordered and len(kernels) > 1
    ):
        return [_quantized_products(inputs, [kernel], backend, split)[0] for kernel in kernels]
    if form.is_ordered:
        return _quantized_products(inputs[..., kernels[0].order[0]], [kernels[0].in_order()], backend, split)
    is_rounded = backend.activations is not None and multiplies_rounded(form)
    panels = [kernel for kernel in kernels if isinstance(kernel, PanelArray)]
    if panels:
        return _multiply_panels(inputs, panels, is_rounded)
    by_columns = isinstance(kernels[0], ColumnArray) and backend.kernels != "xla"
    if is_rounded and not by_columns:
        return multiply_rounded(inputs, [kernel.by_rows() for kernel in kernels], backend, split)
    own = _multiply_few_bits(inputs, kernels, backend, split)
    if own is not None:
        return own
    return [_multiply_widened(inputs, kernel, backend, split) for kernel in kernels]


def _multiply_panels(inputs: Any, kernels: Sequence[PanelArray], is_rounded: bool) -> list[Any]:
    """Return products with kernels of one form in panels, which no mesh splits."""
    *lead, width = inputs.shape
    if not inputs.size:
        return [jnp.zeros((*lead, kernel.shape[0]), jnp.float32) for kernel in kernels]
    found = multiply_panels(inputs.reshape(-1, width), *kernels, is_rounded=is_rounded)
    return [each.reshape(*lead, -1) for each in found]


def _multiply_widened(inputs: Any, kernel: QuantizedArray, backend: Backend, split: Split) -> Any:
    """Return a product with a quantized kernel by a TPU's kernel or by XLA."""
    if isinstance(kernel, ColumnArray) and backend.kernels != "xla":
        return multiply_columns(inputs, kernel, backend, split)
    if kernel.form in (INT8, FP8):
        # A TPU's compiler widens codes where it multiplies them, and as fast as a kernel of our own.
        codes = kernel.codes
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn) if kernel.form == FP8 else codes
        widened = codes.astype(backend.param_dtype)
        if backend.platform == "tpu":
            # For one row the compiler would multiply without its matrix unit, and lay tables out anew.
            backend = replace(backend, min_matmul_rows=_FEW_ROWS)
        return _products(inputs, [widened], backend, False, split)[0] * kernel.scales[:, 0]
    dense = kernel.dequantize().astype(backend.param_dtype)
    return _products(inputs, [dense], backend, False, split)[0]


def _multiply_few_bits(
    inputs: Any, kernels: Sequence[QuantizedArray], backend: Backend, split: Split
) -> list[Any] | None:
    """Return products with kernels of one form by the CPU kernels, None if these do not support them."""
    *lead, width = inputs.shape
    form = kernels[0].form
    out_axis, in_axis = kernel_axes(kernels, split, backend)
    devices = 1 if in_axis is None or backend.mesh is None else backend.mesh.shape[in_axis]
    is_stored = not isinstance(kernels[0], ColumnArray)
    if not (backend.cpu_kernels and is_stored and math.prod(lead) and multiplies_few_bits(form, width // devices)):
        return None

    def multiply(inputs: Any, *kernels: Any) -> list[Any]:
        *lead, width = inputs.shape
        outputs = multiply_few_bits(inputs.reshape(-1, width), form, kernels)
        outputs = [output.reshape(*lead, -1) for output in outputs]
        return _joined(outputs, in_axis, backend)

    rows = row_axes(lead, backend)
    parts = PartitionSpec(*rows, in_axis), *[tuple(kernels[0].specs(PartitionSpec(out_axis, in_axis)))] * len(kernels)
    run = backend.on_devices(multiply, parts, PartitionSpec(*rows, out_axis))
    return run(inputs, *(kernel.matrix for kernel in kernels))


def _multiply_by_kernels(inputs: Any, kernels: Sequence[Any], backend: Backend, split: Split) -> list[Any] | None:
    """Return products with kernels ``[out, in]`` by the CPU kernels, None if these do not support them."""
    *lead, width = inputs.shape
    dtype = kernels[0].dtype
    fit = all(kernel.dtype == dtype and kernel.shape[1] == width and kernel.shape[0] for kernel in kernels)
    if not (math.prod(lead) and backend.cpu_kernels and fit and products.multiplies(dtype, width)):
        return None
    out_axis, in_axis = kernel_axes(kernels, split, backend)

    def multiply(inputs: Any, *kernels: Any) -> list[Any]:
        *lead, width = inputs.shape
        rows = inputs.reshape(1, 1, -1, width)
        sizes = tuple(kernel.shape[0] for kernel in kernels)
        outputs = products.multiply_by_each(rows, tuple(kernel[None, None] for kernel in kernels), 0, sizes)
        outputs = [output.reshape(*lead, size) for output, size in zip(outputs, sizes)]
        return _joined(outputs, in_axis, backend)

    rows = row_axes(lead, backend)
    parts = PartitionSpec(*rows, in_axis), *[PartitionSpec(out_axis, in_axis)] * len(kernels)
    run = backend.on_devices(multiply, parts, PartitionSpec(*rows, out_axis))
    return run(inputs.astype(dtype), *map(jnp.asarray, kernels))


def _joined(outputs: list[Any], in_axis: str | None, backend: Backend) -> list[Any]:
    """Return whole sums of what devices have added up along their inputs."""
    return outputs if in_axis is None else [added_over(output, in_axis, backend) for output in outputs]


def _multiply_apart(inputs: Any, kernel: Any, backend: Backend, transposed: bool, split: Split) -> Any | None:
    """Return a product by XLA whose parts are added up in bytes, None where the compiler may add them as it likes."""
    width = kernel.shape[0 if transposed else 1]
    in_axis = split[1] and even_axis(split[1], width, backend)
    if backend.collectives is None or in_axis is None or not math.prod(inputs.shape[:-1]):
        return None

    def multiply(inputs: Any, kernel: Any) -> Any:
        return added_over(multiply_by_xla(inputs, kernel, backend, transposed), in_axis, backend)

    rows = row_axes(inputs.shape[:-1], backend)
    of_kernel = PartitionSpec(in_axis, None) if transposed else PartitionSpec(None, in_axis)
    run = backend.on_devices(multiply, (PartitionSpec(*rows, in_axis), of_kernel), PartitionSpec(*rows, None))
    return run(inputs, kernel)


def multiply_by_xla(inputs: Any, kernel: Any, backend: Backend, transposed: bool) -> Any:
    """Return `product` as the compiler computes it, on one device or as it splits the arrays."""
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
    # XLA's CPU product of one bfloat16 row runs at a tenth of the memory bandwidth; of four rows, at nearly all of it.
    # So rows are repeated. A maximum merges the equal results, because for a plain slice the compiler would reduce the
    # product to one row again.
    repeats = -(-backend.min_matmul_rows // count)
    if repeats == 1:
        # Not flattened: one axis could not be split over devices both by rows and by tokens.
        return multiply(inputs)
    output = multiply(jnp.repeat(inputs.reshape(-1, width), repeats, axis=0))
    output = jnp.max(output.reshape(count, repeats, -1), axis=1)
    return output.reshape(*lead, outputs)
