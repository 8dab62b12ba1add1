"""Rows of an embedding table."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.rows import take_rows


def embed(table_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"], backend: Backend) -> Float[Array, "B T D"]:
    """Return the tokens' rows in the compute dtype; ids outside the vocabulary read its first or last row."""
    if backend.kernel_rows and table_VD.dtype.itemsize == 2:
        rows = take_rows(table_VD, tokens_BT.reshape(-1)).reshape(*tokens_BT.shape, -1)
        return rows.astype(backend.compute_dtype)
    ids = jnp.clip(tokens_BT, 0, table_VD.shape[0] - 1)
    if backend.platform == "cpu" and table_VD.dtype.itemsize == 2:
        # XLA's CPU compiler gathers no 16-bit floats: it would convert the whole table to float32 first.
        bits = jax.lax.bitcast_convert_type(table_VD, jnp.uint16)[ids]
        rows = jax.lax.bitcast_convert_type(bits, table_VD.dtype)
    else:
        rows = table_VD[ids]
    return rows.astype(backend.compute_dtype)
