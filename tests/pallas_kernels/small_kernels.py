"""Kernels whose steps, loops and bytes can be counted by hand."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 128


def double(x, *, steps):
    """Double an array, an equal part of its rows a step."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    part = pl.BlockSpec((x.shape[0] // steps, x.shape[1]), lambda step: (step, 0))
    return pl.pallas_call(
        kernel, grid=(steps,), in_specs=[part], out_specs=part, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x)


def double_lower_triangle(x, *, side):
    """Double the blocks (i, j) with j <= i of side x side blocks; the others are neither computed nor fetched."""

    def kernel(x_ref, out_ref):
        @pl.when(pl.program_id(1) <= pl.program_id(0))
        def _():
            out_ref[...] = jnp.sin(x_ref[...])

    shape = (x.shape[0] // side, x.shape[1] // side)
    return pl.pallas_call(
        kernel,
        grid=(side, side),
        in_specs=[pl.BlockSpec(shape, lambda i, j: (i, jnp.minimum(i, j)))],
        out_specs=pl.BlockSpec(shape, lambda i, j: (i, jnp.minimum(i, j))),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    )(x)


def sum_to_lengths(lengths_B, layer, rows_LBSD):
    """Sum the first rows of each item of one layer, fetched by hand, ROWS at a time."""
    batch, width = rows_LBSD.shape[1], rows_LBSD.shape[3]

    def kernel(lengths, layer, rows, out, buffer, arrived):
        item = pl.program_id(0)
        out[...] = jnp.zeros_like(out)

        def add(part, carry):
            start = pl.multiple_of(part * ROWS, ROWS)
            copy = pltpu.make_async_copy(rows.at[layer[0], item, pl.ds(start, ROWS)], buffer, arrived)
            copy.start()
            copy.wait()
            out[...] += buffer[...].reshape(ROWS // 8, 8, width).sum(0)
            return carry

        jax.lax.fori_loop(0, pl.cdiv(lengths[item], ROWS), add, 0)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((8, width), lambda item, *_: (item, 0)),
            scratch_shapes=[pltpu.VMEM((ROWS, width), rows_LBSD.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct((batch * 8, width), rows_LBSD.dtype),
    )(lengths_B, layer, rows_LBSD)


def sum_pages(table_BP, pages_PZD):
    """Sum the pages that each row of a table names."""
    batch, used = table_BP.shape
    size, width = pages_PZD.shape[1:]

    def kernel(table, page, out):
        @pl.when(pl.program_id(1) == 0)
        def _():
            out[...] = jnp.zeros_like(out)

        @pl.when(table[pl.program_id(0), pl.program_id(1)] > 0)
        def _():
            out[...] += page[0]

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, used),
            in_specs=[pl.BlockSpec((1, size, width), lambda item, slot, table: (table[item, slot], 0, 0))],
            out_specs=pl.BlockSpec((size, width), lambda item, slot, table: (item, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch * size, width), pages_PZD.dtype),
    )(table_BP, pages_PZD)


def sum_pages_of_shifted_table(table_BP, pages_PZD):
    """Look the pages up one after those that the table names: the kernel's operand is computed by the program."""
    return sum_pages(jax.nn.relu(table_BP) + 1, pages_PZD)


def multiply(x, y):
    """Multiply two matrices that fit."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    out = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
    in_hbm = [pl.BlockSpec(x.shape, lambda step: (0, 0)), pl.BlockSpec(y.shape, lambda step: (0, 0))]
    return pl.pallas_call(
        kernel, grid=(1,), in_specs=in_hbm, out_specs=pl.BlockSpec(out.shape, lambda step: (0, 0)), out_shape=out
    )(x, y)


def stop_by_data(x):
    """Loop as often as a number says that is in the data."""

    def kernel(x_ref, out_ref):
        bound = jnp.max(x_ref[...]).astype(jnp.int32)
        out_ref[...] = jax.lax.fori_loop(0, bound, lambda _, y: jnp.sin(y), x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def too_large(x):
    """Ask for more vector memory than a core has."""

    def kernel(x_ref, out_ref, scratch):
        scratch[...] = jnp.zeros_like(scratch)
        out_ref[...] = x_ref[...] + scratch[:8]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((1 << 20, 128), jnp.float32)],
    )(x)
