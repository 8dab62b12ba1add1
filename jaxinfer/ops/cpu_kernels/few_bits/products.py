"""Products with weights in few bits on a CPU, read as they are stored.

A row's results do not depend on the other rows or on their number.
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.few_bits.product_code import few_bits_module, row_dtype
from jaxinfer.ops.cpu_kernels.few_bits.sparse_code import sparse_module
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS, INT8, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


def has_kernels(form: Format | None) -> bool:
    """Whether a form, or with None every one of GGUF's, has kernels on this processor, or needs none."""
    if form is not None and form.kept is not None:
        return True
    vectors, forms = host_vectors(), GGUF_FORMATS.values() if form is None else (form, INT8)
    return vectors is not None and all(supports(vectors, each) for each in forms)


def multiplies_few_bits(form: Format, width: int) -> bool:
    """Whether `multiply_few_bits` supports weights of a form in rows of this width."""
    vectors = host_vectors()
    return vectors is not None and width > 0 and width % form.unit == 0 and supports(vectors, form)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def multiply_few_bits(
    rows_MK: Float[Array, "M K"],
    form: Format,
    weights: tuple[tuple[Any, ...], ...],
    place: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Return dot products of rows, rounded to bfloat16, with each of several matrices, in float32.

    A matrix is the arrays of a `QuantizedArray` of this form; with a ``place``, it is the one at this place of a stack
    ``[X, N, K]``, whose others are not read. Check `multiplies_few_bits` first. If a compiler splits arrays over
    devices, each device gets the whole array.
    """
    vectors = host_vectors()
    assert vectors is not None
    count, width = rows_MK.shape
    in_stacks = place is not None
    for matrix in weights:
        lead, outputs = matrix[0].shape[:in_stacks], matrix[0].shape[in_stacks]
        expected = [((*lead, *shape), dtype) for shape, dtype in form.parts(outputs, width).values()]
        if [(part.shape, part.dtype.name) for part in matrix] != expected or not matrix[0].size * count:
            found = ", ".join(f"{part.dtype}{part.shape}" for part in matrix)
            raise ValueError(f"rows {rows_MK.shape} and {found} of {form} do not fit")
    rows_MK = rows_MK.astype(jnp.bfloat16)
    if form.kept is None:
        module, dtype = few_bits_module, row_dtype(vectors, form)
    else:
        module, dtype = sparse_module, "bfloat16" if vectors.pairs_bfloat16 else "float32"
    rows_MK = rows_MK.astype(dtype)
    build = functools.partial(module, form=form, count=len(weights), in_stacks=in_stacks)
    shapes = [jax.ShapeDtypeStruct((count, codes.shape[-2]), jnp.float32) for codes, *_ in weights]
    operands = [part for matrix in weights for part in matrix]
    operands = [jnp.asarray(place, jnp.int32), *operands] if in_stacks else operands
    name = f"multiply_few_bits_{name_of_form(form)}_by_{len(weights)}{'_in_stacks' if in_stacks else ''}"
    return tuple(call(name, build, "bfloat16", shapes, rows_MK, *operands))


@multiply_few_bits.defjvp
def _multiply_few_bits_jvp(form: Format, primals: Any, tangents: Any) -> Any:
    def reference(rows_MK: jax.Array, weights: tuple[tuple[Any, ...], ...], place: Any) -> tuple[jax.Array, ...]:
        if place is not None:
            weights = jax.tree.map(lambda part: part[place], weights)
        dense = [QuantizedArray.of(form, matrix).dequantize() for matrix in weights]
        precision = jax.lax.Precision.HIGHEST
        rows_MK = rows_MK.astype(jnp.bfloat16).astype(jnp.float32)
        return tuple(jnp.einsum("mk,nk->mn", rows_MK, each, precision=precision) for each in dense)

    # Values too, as in `products`.
    return jax.jvp(reference, primals, tangents)


def name_of_form(form: Format) -> str:
    """Return letters that stand for a form."""
    assert not form.is_ordered
    if form.kept is not None:
        return f"{'_of_'.join(map(str, form.kept))}{f'_blocks_of_{form.block}' if form.block > 1 else ''}"
    levels = hashlib.sha256(repr(form.levels).encode()).hexdigest()[:8] if form.levels else "bytes"
    shift = "_minima" if form.has_minima else "_zeros" if form.has_zeros else ""
    supers = f"_supers{form.supers}" if form.supers else ""
    return f"{form.bits}_{form.group or 'row'}_{levels}{shift}{supers}_{form.scale_dtype}"
