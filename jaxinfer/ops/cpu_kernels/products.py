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


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def multiply_by_each(
    rows_BCMK: Float[Array, "B C M K"],
    weights: tuple[Float[Array, "L B _ _"], ...],
    layer: Int[Array, ""] | int,
    outputs: tuple[int, ...],
) -> tuple[Float[Array, "B C M _"], ...]:
    """Return `multiply` for each of several weights, in one call, so that threads synchronise once."""
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


@multiply_by_each.defjvp
def _multiply_jvp(outputs: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    def reference(rows_BCMK: jax.Array, weights: tuple[jax.Array, ...], layer: Any) -> tuple[jax.Array, ...]:
        _, groups, _, numbers = rows_BCMK.shape

        def multiply_by(stack_LBSF: jax.Array, count: int) -> jax.Array:
            part_BNCK = stack_LBSF[layer, :, :count, : groups * numbers].reshape(-1, count, groups, numbers)
            operands, precision = (rows_BCMK, part_BNCK.astype(rows_BCMK.dtype)), jax.lax.Precision.HIGHEST
            return jnp.einsum("bcmk,bnck->bcmn", *operands, precision=precision, preferred_element_type=jnp.float32)

        return tuple(map(multiply_by, weights, outputs))

    # Values too: training needs XLA's products for its gradients, and would compute the others beside them.
    return jax.jvp(reference, primals, tangents)


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
