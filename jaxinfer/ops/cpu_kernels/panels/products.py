"""Products with weights in panels on a CPU: those of the weights by rows, and faster ones for drafts.

A row's results do not depend on the other rows or on their number.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import has_grouped_tiles
from jaxinfer.ops.cpu_kernels.few_bits.products import name_of_form
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.cpu_kernels.panels.panel_code import panel_module
from jaxinfer.ops.cpu_kernels.panels.rows_as_they_are import RowsAsTheyAre
from jaxinfer.ops.cpu_kernels.panels.rows_in_bytes import RoundedInGroups, RoundedRows
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import name_of_products
from jaxinfer.ops.cpu_kernels.sixteen_outputs import ROWS, in_sixteen_lanes
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.panels import OUTPUTS, PanelArray, lies_in_panels

# Without instructions for bytes; more would be slow to compile.
_ROWS_WITHOUT = 2


def multiplies_panels(form: Format, width: int) -> bool:
    """Whether this processor multiplies rows as they are by weights of a form, in rows of ``width``, in panels."""
    vectors = host_vectors()
    return vectors is not None and has_grouped_tiles(vectors, form) and lies_in_panels(form, width)


def drafts_by_panels(form: Format, width: int) -> bool:
    """Whether this processor multiplies rows that are rounded in groups by weights of a form in panels: integers."""
    vectors = host_vectors()
    if vectors is None or not (vectors.dots_bytes or vectors.pairs_bytes) or not supports(vectors, form):
        return False
    is_known = form.offset is not None and not form.is_ordered and not (form.has_zeros and form.group is None)
    return is_known and lies_in_panels(form, width)


def multiply_panels(
    rows_MK: Float[Array, "M K"],
    *panels: PanelArray,
    is_rounded: bool = False,
    place: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Return dot products of rows with each of several matrices of one form, in float32.

    Rows are rounded to bfloat16, as `multiply_few_bits` rounds them, whose results these are; if ``is_rounded``, to
    int8, as for `multiply_rounded_rows`; or, for matrices that draft, to int8 in groups of `RUN`. With a ``place``,
    which only rows as they are may have, the matrices are those at this place of stacks ``[X, N, K]``, whose others are
    not read. Check `multiplies_panels` or `drafts_by_panels` first, and for rounded rows `multiplies_rounded`.
    """
    count, width = rows_MK.shape
    form, drafts = panels[0].form, panels[0].drafts
    for each in panels:
        fits = (each.form, each.drafts, each.shape[-1]) == (form, drafts, width) and each.num_outputs and count
        fits = fits and each.ndim == (2 if place is None else 3) and not (place is not None and (drafts or is_rounded))
        if not fits or [(part.shape, part.dtype.name) for part in each.matrix] != _parts(form, *each.shape):
            found = ", ".join(f"{part.dtype}{part.shape}" for part in each.matrix)
            raise ValueError(f"rows {rows_MK.shape} and {found} of {each.shape} in panels of {form} do not fit")
    if drafts:
        return _call("drafting", rows_MK, panels)
    return _multiply_rounded(rows_MK, panels) if is_rounded else _multiply(rows_MK, panels, place)


def module_of(vectors: Vectors, form: Format, kind: str, row_dtype: str, count: int, in_stacks: bool = False) -> str:
    """Return the assembly of products of a kind: of rows as they are (``exact``), ``rounded``, or for ``drafting``.

    Rows as they are come in bfloat16, others in bfloat16 or float32.
    """
    wide = in_sixteen_lanes(vectors)
    if kind == "exact":
        return panel_module(wide, form, RowsAsTheyAre(vectors, form), count, in_stacks)
    most = ROWS if vectors.dots_bytes or vectors.pairs_bytes else _ROWS_WITHOUT
    vectors = replace(wide, rows=min(most, wide.rows))
    rows = RoundedRows if kind == "rounded" else RoundedInGroups
    return panel_module(vectors, form, rows(vectors, form, row_dtype), count)


@jax.custom_jvp
def _multiply(rows_MK: Any, panels: tuple[PanelArray, ...], place: Any) -> tuple[Any, ...]:
    return _call("exact", rows_MK.astype(jnp.bfloat16), panels, place)


@_multiply.defjvp
def _multiply_jvp(primals: Any, tangents: Any) -> Any:
    def rounded(rows_MK: jax.Array, panels: tuple[PanelArray, ...], place: Any) -> tuple[jax.Array, ...]:
        if place is not None:
            panels = jax.tree.map(lambda part: part[place], panels)
        return _by_xla(rows_MK.astype(jnp.bfloat16), panels)

    # Values too, as in `products`.
    return jax.jvp(rounded, primals, tangents)


@jax.custom_jvp
def _multiply_rounded(rows_MK: Any, panels: tuple[PanelArray, ...]) -> tuple[Any, ...]:
    return _call("rounded", rows_MK, panels)


@_multiply_rounded.defjvp
def _multiply_rounded_jvp(primals: Any, tangents: Any) -> Any:
    return _multiply_rounded(*primals), jax.jvp(_by_xla, primals, tangents)[1]


def _by_xla(rows_MK: jax.Array, panels: tuple[PanelArray, ...]) -> tuple[jax.Array, ...]:
    """Return the products of rows as they are."""
    rows_MK, precision = rows_MK.astype(jnp.float32), jax.lax.Precision.HIGHEST
    return tuple(jnp.einsum("mk,nk->mn", rows_MK, each.dequantize(), precision=precision) for each in panels)


def _call(kind: str, rows_MK: Any, panels: tuple[PanelArray, ...], place: Any = None) -> tuple[Any, ...]:
    rows_MK = rows_MK if rows_MK.dtype == jnp.bfloat16 else rows_MK.astype(jnp.float32)
    form, dtype, in_stacks = panels[0].form, rows_MK.dtype.name, place is not None
    build = functools.partial(module_of, form=form, kind=kind, row_dtype=dtype, count=len(panels), in_stacks=in_stacks)
    name = f"multiply_panels_{kind}_{name_of_form(form)}_{dtype}_by_{len(panels)}{'_in_stacks' if in_stacks else ''}"
    vectors = host_vectors()
    if kind != "exact" and vectors is not None:
        name += name_of_products(vectors)
    results = [jax.ShapeDtypeStruct((len(rows_MK), each.num_outputs), jnp.float32) for each in panels]
    operands = [part for each in panels for part in each.matrix]
    operands = [jnp.asarray(place, jnp.int32), *operands] if in_stacks else operands
    return tuple(call(name, build, "bfloat16" if kind == "exact" else "int8", results, rows_MK, *operands))


def _parts(form: Format, *shape: int) -> list[tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes of the arrays of weights ``[..., N, K]`` in panels."""
    *lead, outputs, width = shape
    panels, runs = -(-outputs // OUTPUTS), width // RUN
    codes = (*lead, panels, runs, OUTPUTS * form.row_bytes(RUN)), "uint8"
    others = list(form.parts(1, width).values())[1:]
    return [codes, *(((*lead, panels, of_part[1], OUTPUTS), dtype) for of_part, dtype in others)]
