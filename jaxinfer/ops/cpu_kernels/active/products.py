"""Products on a CPU that leave out features that are zero: the down product of a feed-forward layer, and its up one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.cpu_kernels.active.column_code import column_module
from jaxinfer.ops.cpu_kernels.active.row_code import row_module
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors


def leaves_out(dtype: Any, features: int, model_dim: int) -> bool:
    """Whether both products support weights of a dtype, of so many features and outputs.

    A matrix unit adds in an order of its own, and pairs of bfloat16 need an even number of features.
    """
    vectors, name = host_vectors(), jnp.dtype(dtype).name
    if vectors is None or name not in vectors.dtypes or not features or not model_dim:
        return False
    in_unit = vectors.tiles(name, features) or vectors.tiles(name, model_dim)
    return not in_unit and not (vectors.pairs(name) and features % 2)


def unit_of(dtype: Any) -> int:
    """Return how many neighbouring features are left out together: 2 where bfloat16 is multiplied in pairs."""
    vectors = host_vectors()
    return 2 if vectors is not None and vectors.pairs(jnp.dtype(dtype).name) else 1


def multiply_columns(rows_MF: Float[Array, "M F"], columns_FN: Float[Array, "F N"]) -> Float[Array, "M N"]:
    """Return rows times weights, in float32 and in the bits of `products.multiply` with the weights as ``[N, F]``.

    Weights of features that are zero in all rows are not read, and all are finite. Check `leaves_out` first.
    """
    if rows_MF.shape[1] != columns_FN.shape[0] or 0 in (*rows_MF.shape, *columns_FN.shape):
        raise ValueError(f"{rows_MF.shape} and {columns_FN.shape} do not fit")
    dtype = columns_FN.dtype.name
    result = jax.ShapeDtypeStruct((rows_MF.shape[0], columns_FN.shape[1]), jnp.float32)
    build = functools.partial(column_module, dtype=dtype)
    return call("active_columns", build, dtype, result, _as_rows(rows_MF, dtype), columns_FN)


def multiply_rows(
    rows_MK: Float[Array, "M K"], active_MF: Float[Array, "M F"], weights_FK: Float[Array, "F K"]
) -> Float[Array, "M F"]:
    """Return `products.multiply` for the outputs that are active in some row, in the same bits, and zeros elsewhere.

    Weights of the others are not read. Check `leaves_out` first.
    """
    shapes = rows_MK.shape, active_MF.shape, weights_FK.shape
    fits = shapes[0][0] == shapes[1][0] and shapes[1][1] == shapes[2][0] and shapes[0][1] == shapes[2][1]
    if not fits or 0 in (*shapes[0], *shapes[2]):
        raise ValueError(f"{shapes[0]}, {shapes[1]} and {shapes[2]} do not fit")
    dtype = weights_FK.dtype.name
    result = jax.ShapeDtypeStruct(active_MF.shape, jnp.float32)
    operands = _as_rows(rows_MK, dtype), active_MF.astype(jnp.float32), weights_FK
    return call("active_rows", functools.partial(row_module, dtype=dtype), dtype, result, *operands)


def _as_rows(rows: Any, dtype: str) -> Any:
    """Round rows as the dense product does: to the weights' dtype, and then as the processor multiplies them."""
    vectors = host_vectors()
    assert vectors is not None
    return rows.astype(dtype).astype(vectors.row_dtype(dtype))
