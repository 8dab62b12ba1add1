"""Reads rows of an embedding table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import TENSOR, Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.rows import take_rows
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


def embed(
    table_VD: Float[Array, "V D"] | QuantizedArray, tokens_BT: Int[Array, "B T"], backend: Backend
) -> Float[Array, "B T D"]:
    """Return the tokens' rows in the compute dtype; ids outside the vocabulary read its first or last row."""
    ids = jnp.clip(tokens_BT, 0, table_VD.shape[0] - 1)
    if isinstance(table_VD, ColumnArray) and backend.kernels != "xla":
        return _column_rows(table_VD, ids, backend)
    if isinstance(table_VD, QuantizedArray):
        if backend.platform == "tpu" and ids.size == 1:
            # A TPU's compiler would lay the whole table out anew to take one row of bytes; of two it does not.
            rows = jax.lax.optimization_barrier(table_VD.rows(jnp.repeat(ids.reshape(-1), 2)))
            rows = rows.map_rows(lambda part: part[:1].reshape(*ids.shape, -1))
        else:
            rows = table_VD.rows(ids)
        return rows.dequantize().astype(backend.compute_dtype)
    if backend.platform == "cpu" and table_VD.dtype.itemsize == 2:
        # A mesh's devices have parts of the table, which the compiler reads.
        rows = _short_rows(table_VD, ids, backend.cpu_kernels and backend.mesh is None)
    else:
        rows = table_VD[ids]
    return rows.astype(backend.compute_dtype)


def _column_rows(table_VD: ColumnArray, ids_BT: jax.Array, backend: Backend) -> jax.Array:
    """Return rows of a table that lies by columns, as products read it, in the compute dtype: each device its own."""
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.take_columns import LANES, take_columns
    from pallas_kernels.take_columns.reference import reference_columns

    by_kernel = functools.partial(take_columns, interpret=backend.kernels == "interpret")
    run: Any = reference_columns if backend.kernels == "reference" else by_kernel
    axis = even_axis(TENSOR, table_VD.shape[0], backend)

    def take(ids_BT: jax.Array, *parts: jax.Array) -> jax.Array:
        count = parts[0].shape[1]
        own_T = ids_BT.reshape(-1) - (0 if axis is None else count * lax.axis_index(axis))
        columns_T = jnp.clip(own_T, 0, count - 1)
        # The kernel reads so many columns for each token; a prompt's would be more than the compiler reads, which is
        # the whole table.
        taken = (reference_columns if columns_T.size * LANES >= count else run)(parts, columns_T)
        rows_TD = table_VD.with_parts([part.T for part in taken]).by_rows().dequantize()
        rows_TD = rows_TD.astype(backend.compute_dtype)
        if axis is not None:
            rows_TD = lax.psum(jnp.where((own_T == columns_T)[:, None], rows_TD, 0), axis)
        return rows_TD.reshape(*ids_BT.shape, -1)

    rows = PartitionSpec(*row_axes(ids_BT.shape, backend))
    given = rows, *table_VD.specs(PartitionSpec(axis, None))
    return backend.on_devices(take, given, PartitionSpec(*rows, None))(ids_BT, *table_VD.matrix)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _short_rows(table_VD: jax.Array, ids_BT: jax.Array, has_kernels: bool) -> jax.Array:
    """Return rows of 16-bit floats without XLA's conversion of the whole table to float32 on a CPU."""
    if has_kernels:
        return take_rows(table_VD, ids_BT.reshape(-1)).reshape(*ids_BT.shape, -1)
    bits = jax.lax.bitcast_convert_type(table_VD, jnp.uint16)[ids_BT]
    return jax.lax.bitcast_convert_type(bits, table_VD.dtype)


@_short_rows.defjvp
def _short_rows_jvp(has_kernels: bool, primals: Any, tangents: Any) -> Any:
    return _short_rows(*primals, has_kernels), jax.jvp(lambda table, ids: table[ids], primals, tangents)[1]
