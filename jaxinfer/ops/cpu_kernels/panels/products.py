"""Products with weights in panels on a CPU that multiplies vectors of bytes.

A row's results do not depend on the other rows or on their number.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.cpu_kernels.panels.panel_code import panel_module
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.panels import OUTPUTS, lies_in_panels


def multiplies_panels(form: Format, width: int) -> bool:
    """Whether this processor multiplies weights of a form, in rows of ``width``, in panels."""
    vectors = host_vectors()
    return vectors is not None and vectors.dots_bytes and lies_in_panels(form, width)


def multiply_panels(
    rows_MK: Float[Array, "M K"], form: Format, weights: tuple[tuple[Any, Any], ...], outputs: tuple[int, ...]
) -> tuple[Float[Array, "M _"], ...]:
    """Return dot products of rows, rounded to int8 in groups of `RUN`, with each of several matrices, in float32.

    A matrix is the arrays of a `PanelArray` of this form, which has so many ``outputs``. Check `multiplies_panels`
    first.
    """
    count, width = rows_MK.shape
    lines = 1 + form.has_minima
    for (codes, scales), number in zip(weights, outputs, strict=True):
        panels = -(-number // OUTPUTS)
        of_scales = (panels, 1 if form.group is None else width // RUN, lines * OUTPUTS)
        fits = codes.shape == (panels, width // RUN, OUTPUTS * RUN * form.bits // 8) and scales.shape == of_scales
        if not (fits and count and number and scales.dtype.name == form.scale_dtype):
            raise ValueError(f"rows {rows_MK.shape} and panels {codes.shape}, {scales.dtype}{scales.shape} do not fit")
    rows_MK = rows_MK if rows_MK.dtype == jnp.bfloat16 else rows_MK.astype(jnp.float32)
    dtype = rows_MK.dtype.name
    build = functools.partial(panel_module, form=form, row_dtype=dtype, count=len(weights))
    shifted = "minima" if form.has_minima else f"by{form.offset}"
    of_rows = "_of_rows" if form.group is None else ""
    name = f"multiply_panels_{form.bits}_{shifted}_{form.scale_dtype}{of_rows}_{dtype}_by_{len(weights)}"
    results = [jax.ShapeDtypeStruct((count, number), jnp.float32) for number in outputs]
    operands = [part for matrix in weights for part in matrix]
    return tuple(call(name, build, "int8", results, rows_MK, *operands))
