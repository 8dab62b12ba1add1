"""Products of rows in int8 with weights in few bits on a CPU: bytes times bytes, as they are stored.

A row's results do not depend on the other rows or on their number, nor on whether the processor has instructions for
bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.cpu_kernels.few_bits.tiles import GROUP_LANES, supports
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import VECTOR, name_of_products
from jaxinfer.ops.cpu_kernels.rounded_rows.product_code import rounded_module
from jaxinfer.ops.cpu_kernels.rounded_rows.rounding_code import rounding_module
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.rounded_rows import MOST_INPUTS, RoundedRows, multiplies_rounded


def has_rounded_kernels(form: Format, width: int) -> bool:
    """Whether `multiply_rounded_rows` supports weights of a form in rows of this width."""
    vectors = host_vectors()
    is_known = vectors is not None and multiplies_rounded(form) and supports(vectors, form)
    return is_known and 0 < width <= MOST_INPUTS and width % form.unit == 0


def round_rows_by_kernel(rows_MK: Float[Array, "M K"], group: int | None) -> tuple[Array, Array, Array]:
    """Return `padded_rows` of rows rounded to int8, by one kernel."""
    count, width = rows_MK.shape
    if width % RUN or not rows_MK.size:
        raise ValueError(f"rows {rows_MK.shape} are no whole runs of {RUN}")
    pitch, num_sums = _pitch(width), _num_sums(width, group)
    shapes = [
        jax.ShapeDtypeStruct((count, pitch), jnp.int8),
        jax.ShapeDtypeStruct((count, num_sums), jnp.float32),
        jax.ShapeDtypeStruct((count, 1), jnp.float32),
    ]
    build = functools.partial(rounding_module, group=group)
    return tuple(call(f"round_rows_{group or 'row'}", build, "int8", shapes, rows_MK.astype(jnp.float32)))


def padded_rows(rows: RoundedRows, group: int | None) -> tuple[Array, Array, Array]:
    """Return what `multiply_rounded_rows` reads: codes, the sums of their groups or rows, and scales."""
    codes_MK, scales_M1 = rows
    count, width = codes_MK.shape
    groups = codes_MK.astype(jnp.int32).reshape(count, -1, group or width)
    sums_MG = jnp.sum(groups, axis=-1).astype(jnp.float32)
    sums_MS = jnp.pad(sums_MG, ((0, 0), (0, _num_sums(width, group) - sums_MG.shape[1])))
    return jnp.pad(codes_MK, ((0, 0), (0, _pitch(width) - width))), sums_MS, scales_M1


def multiply_rounded_rows(
    rows: tuple[Array, Array, Array], form: Format, weights: tuple[tuple[Any, ...], ...], has_scales: bool = True
) -> tuple[Array, ...]:
    """Return dot products of rows with each of several matrices, in float32.

    Rows are what `padded_rows` returns; a matrix is the arrays of a `QuantizedArray` of this form. Check
    `has_rounded_kernels` first. Without ``has_scales``, for forms of one scale a row, products are those of the codes,
    in int32. If a compiler splits arrays over devices, each device gets the whole array.
    """
    codes, sums, scales = rows
    count = codes.shape[0]
    width = weights[0][0].shape[1] * 8 // form.bits
    shapes = (count, _pitch(width)), (count, _num_sums(width, form.group)), (count, 1)
    fits = (codes.shape, sums.shape, scales.shape) == shapes and codes.dtype == jnp.int8
    for matrix in weights:
        expected = form.parts(matrix[0].shape[0], width)
        fits &= [(part.shape, part.dtype.name) for part in matrix] == list(expected.values()) and matrix[0].size > 0
    if not fits or not count or (form.group is not None and not has_scales):
        found = ", ".join(f"{part.dtype}{part.shape}" for part in (*rows, *(part for each in weights for part in each)))
        raise ValueError(f"{found} of {form} do not fit")
    build = functools.partial(rounded_module, form=form, count=len(weights), has_scales=has_scales)
    dtype = jnp.float32 if has_scales else jnp.int32
    results = [jax.ShapeDtypeStruct((count, len(matrix[0])), dtype) for matrix in weights]
    operands = [part for matrix in weights for part in matrix]
    if form.group is None:
        operands = [part.astype(jnp.float32) if at % 2 else part for at, part in enumerate(operands)]
        form = Format(form.bits, None)
    vectors = host_vectors()
    assert vectors is not None
    unsigned = f"by{form.offset}" + ("_minima" if form.has_minima else "") + f"_{form.scale_dtype}"
    how = name_of_products(vectors) + ("" if has_scales else "_integers")
    name = f"multiply_rounded_{form.bits}_{form.group or 'row'}_{unsigned}{how}_by_{len(weights)}"
    return tuple(call(name, build, "int8", results, *rows, *operands))


def _pitch(width: int) -> int:
    return -(-width // VECTOR) * VECTOR


def _num_sums(width: int, group: int | None) -> int:
    return 1 if group is None else -(-width // group // GROUP_LANES) * GROUP_LANES
