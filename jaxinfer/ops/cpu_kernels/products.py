"""Products on a CPU, compiled for its processor.

Decoding multiplies one row, or the few rows of a batch or a draft, by every weight. XLA's CPU backend reads weights for
this at a tenth to a half of the memory's speed; these kernels reach most of it, and compute a prompt's many rows about
as fast as XLA does (`jaxinfer bench latency`). They are LLVM assembly, which llvmlite compiles in a tenth of a second
when the first one is traced. XLA calls them as foreign functions.

A row's results do not depend on the other rows or on their number.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.machine_code import IN_TILES, call, host_vectors
from jaxinfer.ops.cpu_kernels.matrix_unit_code import matrix_module, scratch_numbers
from jaxinfer.ops.cpu_kernels.product_code import dot_module
from jaxinfer.ops.cpu_kernels.tiles import Vectors


def multiplies(dtype: Any, numbers: int) -> bool:
    """Whether `multiply` supports weights of a dtype in rows of this length."""
    vectors = host_vectors()
    name = jnp.dtype(dtype).name
    return vectors is not None and name in vectors.dtypes and numbers > 0


def multiply(
    rows_BCMK: Float[Array, "B C M K"],
    weights_LBSF: Float[Array, "L B S F"],
    layer: Int[Array, ""] | int,
    outputs: int,
) -> Float[Array, "B C M N"]:
    """Return the dot products of rows with the first ``outputs`` rows of ``weights[layer]``, in float32.

    A row of weights has C parts of K numbers, and may have more. Both have one dtype. Check `multiplies` first. If a
    compiler splits arrays over devices, each device gets the whole array.
    """
    return multiply_by_each(rows_BCMK, (weights_LBSF,), layer, (outputs,))[0]


def multiply_by_each(
    rows_BCMK: Float[Array, "B C M K"],
    weights: tuple[Float[Array, "L B _ _"], ...],
    layer: Int[Array, ""] | int,
    outputs: tuple[int, ...],
) -> tuple[Float[Array, "B C M _"], ...]:
    """Return `multiply` for each of several weights, in one call, so that threads synchronise once.

    It has gradients, and no derivatives in forward mode: these could not be told how to round.
    """
    found: Any = _multiply_by_each(rows_BCMK, weights, layer, outputs)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply_by_each(rows_BCMK: Any, weights: Any, layer: Any, outputs: tuple[int, ...]) -> tuple[Any, ...]:
    dtype = weights[0].dtype.name
    if any(each.dtype != dtype for each in weights):
        raise ValueError(f"weights of {', '.join(each.dtype.name for each in weights)} do not fit one another")
    for each, count in zip(weights, outputs, strict=True):
        _check_fit(rows_BCMK, each, count)
    vectors, name = host_vectors(), f"multiply_by_{len(weights)}"
    batch, groups, count, numbers = rows_BCMK.shape
    if vectors is not None and vectors.tiles(dtype, numbers):
        scratch = jax.ShapeDtypeStruct((scratch_numbers(batch * groups, count, numbers),), jnp.bfloat16)
        build = functools.partial(matrix_module, count=len(weights))
        return _call(name + IN_TILES, build, dtype, rows_BCMK, weights, layer, outputs, (scratch,))
    build = functools.partial(dot_module, dtype=dtype, count=len(weights))
    return _call(name, build, dtype, rows_BCMK, weights, layer, outputs)


def _by_xla(
    rows_BCMK: Any, weights: Any, layer: Any, outputs: tuple[int, ...]
) -> tuple[tuple[Float[Array, "B C M _"], ...], Any]:
    """Return values for training, and what their gradients take.

    By XLA's products, as other kernels' derivatives: a program that needs these too would compute both, and a compiler
    counts no operations of a foreign function.
    """
    parts = [_part_of(stack, rows_BCMK, layer, count) for stack, count in zip(weights, outputs)]
    found = tuple(_einsum("bcmk,bnck->bcmn", rows_BCMK, part.astype(rows_BCMK.dtype)) for part in parts)
    return found, (rows_BCMK, weights, layer)


def _gradients(outputs: tuple[int, ...], operands: Any, gradients: Any) -> tuple[Any, Any, None]:
    """Return the gradients of rows and weights by XLA's products.

    Gradients are rounded to bfloat16 where the operands are: XLA would widen these to multiply both, at half the speed.
    """
    rows_BCMK, weights, layer = operands
    dtype = jnp.bfloat16 if rows_BCMK.dtype == jnp.bfloat16 else jnp.float32
    of_rows_BCMK, of_weights = jnp.zeros(rows_BCMK.shape, jnp.float32), []
    for stack_LBSF, count, gradient_BCMN in zip(weights, outputs, gradients):
        part_BNCK, gradient_BCMN = _part_of(stack_LBSF, rows_BCMK, layer, count), gradient_BCMN.astype(dtype)
        of_rows_BCMK += _einsum("bcmn,bnck->bcmk", gradient_BCMN, part_BNCK.astype(dtype))
        of_part_BNCK = _einsum("bcmn,bcmk->bnck", gradient_BCMN, rows_BCMK.astype(dtype)).astype(stack_LBSF.dtype)
        if of_part_BNCK.size == stack_LBSF.size:
            of_weights.append(of_part_BNCK.reshape(stack_LBSF.shape))
        else:
            # A whole stack for each of its layers: whoever trains stacks is to take a layer out first.
            of_part_BSF = of_part_BNCK.reshape(*of_part_BNCK.shape[:2], -1)
            place = layer, slice(None), slice(count), slice(of_part_BSF.shape[2])
            of_weights.append(jnp.zeros_like(stack_LBSF).at[place].set(of_part_BSF))
    return of_rows_BCMK.astype(rows_BCMK.dtype), tuple(of_weights), None


_multiply_by_each.defvjp(_by_xla, _gradients)


def _part_of(stack_LBSF: Any, rows_BCMK: Any, layer: Any, count: int) -> Float[Array, "B N C K"]:
    _, groups, _, numbers = rows_BCMK.shape
    return stack_LBSF[layer, :, :count, : groups * numbers].reshape(-1, count, groups, numbers)


def _einsum(product: str, one: Any, other: Any) -> Any:
    return jnp.einsum(product, one, other, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _check_fit(rows_BCMK: jax.Array, stack_LBSF: jax.Array, outputs: int) -> None:
    """Raise an error for arrays that the kernels would read past their end; they check nothing."""
    batch, groups, _, numbers = rows_BCMK.shape
    _, batches, lines, stride = stack_LBSF.shape
    fits = batches == batch and outputs <= lines and groups * numbers <= stride
    if not fits or rows_BCMK.dtype != stack_LBSF.dtype or 0 in (*rows_BCMK.shape, *stack_LBSF.shape):
        raise ValueError(f"{rows_BCMK.dtype}{rows_BCMK.shape} and {stack_LBSF.dtype}{stack_LBSF.shape} do not fit")


def _call(
    name: str,
    build: Callable[[Vectors], str],
    dtype: str,
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    layer: Any,
    outputs: tuple[int, ...],
    scratch: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> tuple[jax.Array, ...]:
    batch, groups, count, numbers = rows.shape
    vectors = host_vectors()
    assert vectors is not None
    # Rows are widened once, not for each output.
    rows = rows.astype(vectors.row_dtype(dtype))
    shapes = [jax.ShapeDtypeStruct((batch * groups, count, each), jnp.float32) for each in outputs]
    operands = rows.reshape(batch * groups, count, numbers), jnp.asarray(layer, jnp.int32), *weights
    results = call(name, build, dtype, [*shapes, *scratch], *operands)
    return tuple(result.reshape(batch, groups, count, -1) for result in results[: len(outputs)])
